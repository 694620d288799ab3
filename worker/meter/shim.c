/* Counts and caps the memory that torch's CPU allocator holds.
 *
 * LD_PRELOAD loads it into the training process. libc10, torch's core library, allocates every CPU
 * tensor with posix_memalign and releases it with free. This file interposes both. It counts and
 * caps only calls from libc10 itself, because oneDNN and OpenMP crash when an allocation fails.
 *
 * A request above the cap fails with ENOMEM, as on a machine without free memory. torch then raises
 * its own "DefaultCPUAllocator: can't allocate memory", and the process continues.
 *
 * free() recognises counted blocks without a table or a lock. Such a block is 16 bytes longer than
 * requested. Its last 16 usable bytes hold its size and a mark made of its address, its size and a
 * secret. The pointer is malloc's own, so a free that bypasses this file is only not counted.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#define SECRET UINT64_C(0x9e3779b97f4a7c15)
#define ALIGNMENT 64 /* of all blocks of libc10; it excludes 3 of 4 other blocks in free() */

struct trailer {
    uint64_t size;
    uint64_t mark;
};

static _Atomic uint64_t live, peak, cap, refused, last_refused;
static _Atomic uintptr_t libc10_start, libc10_end;
static void (*_Atomic real_free)(void *);
static int (*_Atomic real_posix_memalign)(void **, size_t, size_t);

/* --- the functions behind ours ------------------------------------------------------------- */

static __thread int resolving __attribute__((tls_model("initial-exec")));

static void resolve(void)
{
    resolving = 1; /* dlsym itself may call free */
    atomic_store(&real_posix_memalign,
                 (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign"));
    atomic_store(&real_free, (void (*)(void *))dlsym(RTLD_NEXT, "free"));
    resolving = 0;
}

/* --- whose call is it? --------------------------------------------------------------------- */

static int is_libc10(struct dl_phdr_info *info, size_t size, void *unused)
{
    (void)size;
    (void)unused;
    const char *name = info->dlpi_name ? strrchr(info->dlpi_name, '/') : NULL;
    if (name == NULL || strncmp(name, "/libc10.so", sizeof "/libc10.so" - 1) != 0)
        return 0;
    uintptr_t end = 0;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_LOAD) {
            uintptr_t top = info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz;
            end = top > end ? top : end;
        }
    atomic_store(&libc10_start, info->dlpi_addr);
    atomic_store(&libc10_end, info->dlpi_addr + end); /* last: it is what readers look at first */
    return 1;
}

static int from_libc10(uintptr_t caller)
{
    if (UNLIKELY(atomic_load_explicit(&libc10_end, memory_order_acquire) == 0))
        dl_iterate_phdr(is_libc10, NULL);
    return caller < atomic_load_explicit(&libc10_end, memory_order_acquire) &&
           caller >= atomic_load_explicit(&libc10_start, memory_order_relaxed);
}

/* --- the count ----------------------------------------------------------------------------- */

static int take(uint64_t size)
{
    uint64_t limit = atomic_load_explicit(&cap, memory_order_relaxed);
    uint64_t held = atomic_load_explicit(&live, memory_order_relaxed);
    do {
        if (UNLIKELY(limit != 0 && (size > limit || held > limit - size))) {
            atomic_store_explicit(&last_refused, size, memory_order_relaxed);
            atomic_fetch_add_explicit(&refused, 1, memory_order_relaxed);
            return 0;
        }
    } while (!atomic_compare_exchange_weak_explicit(&live, &held, held + size,
                                                    memory_order_relaxed, memory_order_relaxed));
    held += size;
    uint64_t highest = atomic_load_explicit(&peak, memory_order_relaxed);
    while (held > highest &&
           !atomic_compare_exchange_weak_explicit(&peak, &highest, held, memory_order_relaxed,
                                                  memory_order_relaxed))
        ;
    return 1;
}

static void give_back(uint64_t size)
{
    atomic_fetch_sub_explicit(&live, size, memory_order_relaxed);
}

static struct trailer *trailer_of(void *block)
{
    size_t usable = malloc_usable_size(block) & ~(size_t)7;
    return usable < sizeof(struct trailer)
               ? NULL
               : (struct trailer *)((char *)block + usable - sizeof(struct trailer));
}

static uint64_t mark_of(const void *block, uint64_t size)
{
    return SECRET ^ (uint64_t)(uintptr_t)block ^ (size << 1);
}

/* --- what is interposed -------------------------------------------------------------------- */

EXPORT int posix_memalign(void **result, size_t alignment, size_t size)
{
    uintptr_t caller = (uintptr_t)__builtin_return_address(0);
    if (UNLIKELY(real_posix_memalign == NULL))
        resolve();
    if (alignment < ALIGNMENT || size > SIZE_MAX / 2 || !from_libc10(caller))
        return real_posix_memalign(result, alignment, size);
    if (!take(size))
        return ENOMEM;
    int error = real_posix_memalign(result, alignment, size + sizeof(struct trailer));
    struct trailer *trailer = error == 0 ? trailer_of(*result) : NULL;
    if (UNLIKELY(trailer == NULL)) {
        give_back(size);
        return error;
    }
    trailer->size = size;
    trailer->mark = mark_of(*result, size);
    return 0;
}

EXPORT void free(void *block)
{
    if (UNLIKELY(real_free == NULL)) {
        if (resolving)
            return; /* a few bytes of dlsym's, once */
        resolve();
    }
    if (block != NULL && ((uintptr_t)block & (ALIGNMENT - 1)) == 0) {
        struct trailer *trailer = trailer_of(block);
        if (trailer != NULL && trailer->mark == mark_of(block, trailer->size)) {
            trailer->mark = 0;
            give_back(trailer->size);
        }
    }
    real_free(block);
}

/* --- loading and forking ------------------------------------------------------------------- */

/* A forked child is a loader's worker: what it holds is not on the device. */
static void lift_cap(void) { atomic_store(&cap, 0); }

__attribute__((constructor)) static void load(void)
{
    int before = errno;
    if (real_free == NULL)
        resolve();
    const char *text = getenv("AUTOFIT_SHIM_CAP");
    if (text != NULL)
        atomic_store(&cap, strtoull(text, NULL, 10));
    pthread_atfork(NULL, NULL, lift_cap);
    errno = before;
}

/* --- what autofit/worker/meter/kinds/cpu.py reads, all in bytes or counts ------------------------ */

EXPORT uint64_t autofit_shim_allocated(void) { return atomic_load(&live); }
EXPORT uint64_t autofit_shim_peak(void) { return atomic_load(&peak); }
EXPORT void autofit_shim_reset_peak(void) { atomic_store(&peak, atomic_load(&live)); }
EXPORT uint64_t autofit_shim_cap(void) { return atomic_load(&cap); }
EXPORT void autofit_shim_set_cap(uint64_t bytes) { atomic_store(&cap, bytes); }
EXPORT uint64_t autofit_shim_refused(void) { return atomic_load(&refused); }
EXPORT uint64_t autofit_shim_last_refused(void) { return atomic_load(&last_refused); }
