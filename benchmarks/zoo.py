"""Tiny models with random weights, for ``verdicts.py``: which of them may a batch be split of?

Transformers' configs, and modules written here: those whose samples know nothing of each other,
and those whose loss, statistics or memory join the samples. No model here has more than some ten
thousand parameters; a sample is some numbers.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

SAMPLES = 8
BATCHES = 4
WORDS = 48
LENGTH = 8

Call = dict[str, Any]
"""A batch: the arguments of one call, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One model of the zoo."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Call]
    counts: str | None = None
    """What the loss is a mean over: the argument whose labels count; ``None`` for samples."""
    shifted: bool = False
    """The first label of each sample does not count (next-token prediction)."""
    ignored: int = -100
    """Labels of this value do not count."""
    summed: bool = False
    """The loss is a sum over the samples."""
    dim: int = 0
    """The batch dimension of the arguments."""
    truth: bool | None = None
    """Whether it may be split, where random draws do not let that be computed."""
    training: bool = True


ZOO: dict[str, Entry] = {}


def add(entry: Entry) -> None:
    """Put a model into the zoo."""
    assert entry.name not in ZOO, entry.name
    ZOO[entry.name] = entry


# --- batches -----------------------------------------------------------------------------------


def words(length: int = LENGTH) -> torch.Tensor:
    """Return (samples, length) words; the first three have meanings in most configs."""
    return torch.randint(3, WORDS, (SAMPLES, length))


def ragged(length: int = LENGTH) -> torch.Tensor:
    """Return (samples, length) of ones and zeros: how much of each sample is no padding."""
    lengths = torch.randint(length // 2, length + 1, (SAMPLES, 1))
    lengths[0] = length
    return (torch.arange(length) < lengths).long()


def labelled() -> Call:
    """Words, their mask, and the words as labels, ignored where the mask is zero."""
    ids, mask = words(), ragged()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.where(mask.bool(), ids, -100),
    }


def classed(classes: int = 3) -> Callable[[], Call]:
    """Words and a class for each sample."""

    def batch() -> Call:
        mask = ragged()
        labels = torch.randint(classes, (SAMPLES,))
        return {"input_ids": words() * mask, "attention_mask": mask, "labels": labels}

    return batch


def asked() -> Call:
    """Words, and where in them an answer begins and ends."""
    first = torch.randint(0, LENGTH // 2, (SAMPLES,))
    last = first + torch.randint(0, LENGTH // 2, (SAMPLES,))
    return {"input_ids": words(), "start_positions": first, "end_positions": last}


def translated() -> Call:
    """Words, and what they mean in fewer words of another language."""
    labels = torch.where(ragged(6).bool(), words(6), -100)
    return {"input_ids": words(), "attention_mask": ragged(), "labels": labels}


def pictures(size: int = 16, classes: int = 3) -> Callable[[], Call]:
    """Pictures and their classes."""

    def batch() -> Call:
        return {
            "pixel_values": torch.randn(SAMPLES, 3, size, size),
            "labels": torch.randint(classes, (SAMPLES,)),
        }

    return batch


def segmented(size: int = 32) -> Call:
    """Pictures, and a class for each of their points."""
    return {
        "pixel_values": torch.randn(SAMPLES, 3, size, size),
        "labels": torch.randint(3, (SAMPLES, size, size)),
    }


def spoken() -> Call:
    """Sounds and what is said in them."""
    return {"input_values": torch.randn(SAMPLES, 400), "labels": torch.randint(1, 20, (SAMPLES, 3))}


def heard() -> Call:
    """Spectra of sounds and what is said in them."""
    return {"input_features": torch.randn(SAMPLES, 8, 16), "labels": words(6)}


# --- transformers ------------------------------------------------------------------------------

WIDTH: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_labels": 3,
}
STILL: dict[str, Any] = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "dropout_rate": 0.0,
    "classifier_dropout": 0.0,
    "layerdrop": 0.0,
    "embed_dropout": 0.0,
    "resid_dropout": 0.0,
    "summary_last_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "classifier_dropout_prob": 0.0,
    "decoder_layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "seq_classif_dropout": 0.0,
    "qa_dropout": 0.0,
}


@dataclass(frozen=True, slots=True)
class Made:
    """Makes a model of transformers from its config's name and what differs from ``WIDTH``."""

    config: str
    model: str
    changes: dict[str, Any] = field(default_factory=dict)
    drops: bool = False

    def __call__(self) -> nn.Module:
        """Return the model with random weights."""
        import transformers

        cls = getattr(transformers, self.config)
        known = inspect.signature(cls.__init__).parameters.keys() | cls.attribute_map.keys()
        known |= {"num_labels", "pad_token_id", "bos_token_id", "eos_token_id"}
        values = {n: v for n, v in (WIDTH | ({} if self.drops else STILL)).items() if n in known}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: nn.Module = getattr(transformers, self.model)(cls(**(values | self.changes)))
        return model


def from_config(
    name: str,
    config: str,
    model: str,
    batch: Callable[[], Call],
    *,
    counts: str | None = None,
    shifted: bool = False,
    ignored: int = -100,
    drops: bool = False,
    truth: bool | None = None,
    **changes: Any,
) -> None:
    """Put a model of transformers into the zoo."""
    make = Made(f"{config}Config", model, changes, drops)
    add(Entry(name, make, batch, counts, shifted, ignored=ignored, truth=truth))


def causal(name: str, config: str, model: str | None = None, **changes: Any) -> None:
    """Put a model that predicts the next word into the zoo."""
    made = model or f"{config}ForCausalLM"
    from_config(name, config, made, labelled, counts="labels", shifted=True, **changes)


GPT: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
causal("gpt2", "GPT2", "GPT2LMHeadModel", **GPT)
from_config(
    "gpt2, dropout",
    "GPT2",
    "GPT2LMHeadModel",
    labelled,
    counts="labels",
    shifted=True,
    drops=True,
    truth=True,
    **GPT,
)
causal("gpt-neo", "GPTNeo", attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=2)
causal("gpt-j", "GPTJ", rotary_dim=4, **GPT)
causal("gpt-neox", "GPTNeoX")
causal("opt", "OPT", ffn_dim=32, word_embed_proj_dim=16)
causal("bloom", "Bloom", n_layer=2, n_head=2)
causal("llama", "Llama", num_key_value_heads=1)
causal("mistral", "Mistral", num_key_value_heads=1, sliding_window=4)
causal("qwen2", "Qwen2", num_key_value_heads=1)
causal("qwen3", "Qwen3", num_key_value_heads=1, head_dim=8)
causal("gemma", "Gemma", num_key_value_heads=1, head_dim=8)
causal("gemma2", "Gemma2", num_key_value_heads=1, head_dim=8)
causal("phi", "Phi", partial_rotary_factor=0.5)
causal("falcon", "Falcon")
causal("stablelm", "StableLm", num_key_value_heads=1)
causal("mixtral", "Mixtral", num_key_value_heads=1, num_local_experts=4)
causal(
    "mixtral, balanced",
    "Mixtral",
    num_key_value_heads=1,
    num_local_experts=4,
    output_router_logits=True,
    router_aux_loss_coef=0.05,
)
causal("mamba", "Mamba", state_size=4)

from_config("bert, classes", "Bert", "BertForSequenceClassification", classed())
from_config("bert, words", "Bert", "BertForMaskedLM", labelled, counts="labels")
from_config("bert, answers", "Bert", "BertForQuestionAnswering", asked, num_labels=2)
from_config(
    "bert, dropout", "Bert", "BertForSequenceClassification", classed(), drops=True, truth=True
)
from_config("roberta", "Roberta", "RobertaForMaskedLM", labelled, counts="labels")
from_config("roberta, answers", "Roberta", "RobertaForQuestionAnswering", asked, num_labels=2)
DISTIL: dict[str, Any] = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
from_config("distilbert", "DistilBert", "DistilBertForSequenceClassification", classed(), **DISTIL)
from_config(
    "distilbert, answers", "DistilBert", "DistilBertForQuestionAnswering", asked, num_labels=2,
    **DISTIL,
)  # fmt: skip
from_config("albert", "Albert", "AlbertForSequenceClassification", classed(), embedding_size=8)
from_config("electra", "Electra", "ElectraForSequenceClassification", classed(), embedding_size=8)
from_config("deberta-v2", "DebertaV2", "DebertaV2ForSequenceClassification", classed())
from_config("mpnet", "MPNet", "MPNetForSequenceClassification", classed())
from_config(
    "xlnet", "XLNet", "XLNetForSequenceClassification", classed(), d_model=16, n_layer=2, n_head=2,
    d_inner=32,
)  # fmt: skip
BOTH: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 1,
}
T5: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
from_config(
    "t5", "T5", "T5ForConditionalGeneration", translated, decoder_start_token_id=0, counts="labels",
    **T5,
)  # fmt: skip
from_config("bart", "Bart", "BartForConditionalGeneration", translated, counts="labels", **BOTH)
from_config("marian", "Marian", "MarianMTModel", translated, counts="labels", **BOTH)
from_config(
    "pegasus", "Pegasus", "PegasusForConditionalGeneration", translated, counts="labels", **BOTH
)
SOUND: dict[str, Any] = {
    "num_mel_bins": 8,
    "max_source_positions": 8,
    "max_target_positions": 16,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
from_config(
    "whisper", "Whisper", "WhisperForConditionalGeneration", heard, counts="labels",
    **BOTH, **SOUND,
)  # fmt: skip
WAVES: dict[str, Any] = {
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "ctc_loss_reduction": "mean",
}
from_config("wav2vec2", "Wav2Vec2", "Wav2Vec2ForCTC", spoken, **WAVES)
from_config("hubert", "Hubert", "HubertForCTC", spoken, **WAVES)
SEEN: dict[str, Any] = {"image_size": 16, "patch_size": 4}
from_config("vit", "ViT", "ViTForImageClassification", pictures(), **SEEN)
from_config("deit", "DeiT", "DeiTForImageClassification", pictures(), **SEEN)
from_config("beit", "Beit", "BeitForImageClassification", pictures(), drop_path_rate=0.0, **SEEN)
from_config("dinov2", "Dinov2", "Dinov2ForImageClassification", pictures(), **SEEN)
from_config(
    "swin", "Swin", "SwinForImageClassification", pictures(), image_size=16, patch_size=2,
    embed_dim=8, depths=[1, 1], num_heads=[2, 2], num_attention_heads=[2, 2], window_size=4,
    drop_path_rate=0.0,
)  # fmt: skip
from_config(
    "convnext", "ConvNext", "ConvNextForImageClassification", pictures(32),
    hidden_sizes=[8, 16], depths=[1, 1], num_stages=2,
)  # fmt: skip
from_config(
    "resnet", "ResNet", "ResNetForImageClassification", pictures(32), embedding_size=8,
    hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
)  # fmt: skip
from_config(
    "mobilenet-v2", "MobileNetV2", "MobileNetV2ForImageClassification", pictures(32),
    depth_multiplier=0.25, classifier_dropout_prob=0.0,
)  # fmt: skip
from_config(
    "segformer", "Segformer", "SegformerForSemanticSegmentation", segmented,
    hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2],
    decoder_hidden_size=8, drop_path_rate=0.0,
)  # fmt: skip
from_config(
    "clip", "CLIP", "CLIPModel",
    lambda: {"input_ids": words(), "pixel_values": torch.randn(SAMPLES, 3, 16, 16),
             "return_loss": True},
    text_config=WIDTH | {"projection_dim": 8},
    vision_config={n: WIDTH[n] for n in list(WIDTH)[1:5]} | SEEN | {"projection_dim": 8},
    projection_dim=8,
)  # fmt: skip


# --- modules written here ----------------------------------------------------------------------

Use = Callable[..., Any]


class Net(nn.Module):
    """A small body; each entry says what is done with its answer."""

    buffer: torch.Tensor

    def __init__(self, use: Use, body: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body or nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.use = use
        self.kept: Any = None
        self.queue: list[torch.Tensor] = []
        self.register_buffer("buffer", torch.zeros(3))

    def part(self, index: int) -> Any:
        """Return one of the body's layers."""
        return self.body.get_submodule(str(index))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what is made of the arguments."""
        return self.use(self, *args, **kwargs)


def x(*shape: int) -> torch.Tensor:
    """Return samples of some shape."""
    return torch.randn(SAMPLES, *(shape or (6,)))


def y(*shape: int, classes: int = 3) -> torch.Tensor:
    """Return classes."""
    return torch.randint(classes, (SAMPLES, *shape))


def pair() -> Call:
    """Samples and their classes."""
    return {"a": x(), "b": y()}


def two() -> Call:
    """Two samples each."""
    return {"a": x(), "b": x()}


def sequences() -> Call:
    """Sequences and a class each."""
    return {"a": x(5, 6), "b": y()}


def model(
    name: str,
    batch: Callable[[], Call] = pair,
    body: Callable[[], nn.Module] | None = None,
    **known: Any,
) -> Callable[[Use], Use]:
    """Put a module into the zoo: a body and what is done with it."""

    def make(use: Use) -> Use:
        add(Entry(name, lambda: Net(use, body() if body else None), batch, **known))
        return use

    return make


def conv(*norm: nn.Module) -> nn.Sequential:
    """Return two convolutions, the first with a norm behind it."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *norm, nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def plain_pictures() -> Call:
    """Return pictures and their classes."""
    return {"a": x(3, 8, 8), "b": y()}


@model("cross entropy")
@model("relu net", body=lambda: nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3)))
@model("dropout", truth=True,
       body=lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3)))  # fmt: skip
@model("conv", plain_pictures, conv)
@model("conv, group norm", plain_pictures, lambda: conv(nn.GroupNorm(2, 8)))
@model("conv, instance norm", plain_pictures, lambda: conv(nn.InstanceNorm2d(8)))
@model("conv, batch norm", plain_pictures, lambda: conv(nn.BatchNorm2d(8)))
@model("spectral norm", body=lambda: nn.Sequential(spectral_norm(nn.Linear(6, 3))))
@model("weight norm", body=lambda: nn.Sequential(weight_norm(nn.Linear(6, 3))))
@model("prelu", body=lambda: nn.Sequential(nn.Linear(6, 16), nn.PReLU(), nn.Linear(16, 3)))
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body(a), b)


@model("logits alone")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return net.body(a)


@model("cross entropy, a sum", summed=True)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body(a), b, reduction="sum")


@model("softened logits in float32")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body(a).float(), b, label_smoothing=0.1)


@model("gru", sequences, lambda: nn.GRU(6, 3, batch_first=True))
@model("lstm, two ways", sequences, lambda: nn.LSTM(6, 3, 2, batch_first=True, bidirectional=True))
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body(a)[0].mean(1), b)


@model("gru, time first", lambda: {"a": torch.randn(5, SAMPLES, 6)}, lambda: nn.GRU(6, 4), dim=1)
def _(net: Net, a: torch.Tensor) -> Any:
    return net.body(a)[0]


def attention() -> nn.Module:
    """Return two layers of torch's own attention."""
    layer = nn.TransformerEncoderLayer(6, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@model("attention", sequences, attention)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body(a).mean(1)[:, :3], b)


@model("attention, causal mask kept", sequences, attention)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    if net.kept is None:
        net.kept = torch.full((5, 5), -torch.inf).triu(1)
    return F.cross_entropy(net.body(a, mask=net.kept).mean(1)[:, :3], b)


@model("whole transformer", lambda: {"a": x(5, 6), "b": x(4, 6)},
       lambda: nn.Transformer(6, 2, 1, 1, 16, dropout=0.0, batch_first=True))  # fmt: skip
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return net.body(a, b)


@model("auto-encoder", lambda: {"a": x()},
       lambda: nn.Sequential(nn.Linear(6, 3), nn.GELU(), nn.Linear(3, 6)))  # fmt: skip
def _(net: Net, a: torch.Tensor) -> Any:
    return F.mse_loss(net.body(a), a)


@model("variational", lambda: {"a": x()}, truth=True)
def _(net: Net, a: torch.Tensor) -> Any:
    mean = net.body(a)
    return (mean + 0.1 * torch.randn_like(mean)).square().mean() + mean.square().mean()


@model("siamese", two)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.relu(1.0 - (net.body(a) - net.body(b)).square().sum(-1)).mean()


@model("triplets", lambda: {"a": x(), "b": x(), "c": x()})
def _(net: Net, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
    return F.triplet_margin_loss(net.body(a), net.body(b), net.body(c))


@model("flow", lambda: {"a": x()}, lambda: nn.Linear(6, 6))
def _(net: Net, a: torch.Tensor) -> Any:
    volume = torch.linalg.slogdet(net.body.get_parameter("weight"))[1]
    return 0.5 * net.body(a).square().sum(-1).mean() - volume


@model("fourier", lambda: {"a": x(8)}, lambda: nn.Linear(8, 8))
def _(net: Net, a: torch.Tensor) -> Any:
    return torch.fft.rfft(net.body(a)).abs().square().mean()


@model("bag of words", lambda: {"a": y(4, classes=30), "b": y()},
       lambda: nn.EmbeddingBag(30, 3))  # fmt: skip
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body(a), b)


@model("masked mean", lambda: {"a": x(5, 6), "b": x(5, 3), "m": ragged(5)}, counts="m", ignored=0)
def _(net: Net, a: torch.Tensor, b: torch.Tensor, m: torch.Tensor) -> Any:
    return ((net.body(a) - b).square().mean(-1) * m).sum() / m.sum()


@model("mean of means over a mask", lambda: {"a": x(5, 6), "b": x(5, 3), "m": ragged(5)})
def _(net: Net, a: torch.Tensor, b: torch.Tensor, m: torch.Tensor) -> Any:
    each = ((net.body(a) - b).square().mean(-1) * m).sum(1) / m.sum(1)
    return each.mean()


@model("l1 of each sample", two)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.l1_loss(net.body(a), b[:, :3])


@model("largest of each sample", sequences)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body(a).amax(1), b)


@model("penalty on the weights")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body(a), b) + 0.1 * net.part(0).weight.square().sum()


@model("loss and accuracy")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    answers = net.body(a)
    return F.cross_entropy(answers, b), (answers.argmax(-1) == b).float().mean()


@model("graphs, dense", lambda: {"a": x(4, 6), "b": torch.rand(SAMPLES, 4, 4).round()})
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return net.body(b @ a).mean(1).square().mean()


@model("counter", pair)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    net.kept = (net.kept or 0) + 1
    return F.cross_entropy(net.body(a), b)


# --- of these no batch may be split ------------------------------------------------------------


@model("contrastive", two)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    one, other = F.normalize(net.body(a), dim=-1), F.normalize(net.body(b), dim=-1)
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(a)))


@model("whitened by the batch")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body((a - a.mean(0)) / a.std(0)), b)


def falling() -> Call:
    """Sequences of which each lies below the one before, at every time."""
    return {"a": 0.3 * x(5, 6) + torch.arange(SAMPLES).flip(0).view(-1, 1, 1)}


@model("pooled l1 maximum", falling, lambda: nn.Linear(6, 3))
def _(net: Net, a: torch.Tensor) -> Any:
    return net.body(a).abs().mean(1).sum(-1).max()


@model("l1 of the mean", two)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return (net.body(a).mean(0) - 2.0).abs().sum()


@model("clipped by the norm of all", truth=False)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    answers = net.body(a)
    return F.cross_entropy(answers / (answers.norm() / 6.0).clamp(min=1.0), b)


@model("small balance, 0.05")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    answers = net.body(a)
    return F.cross_entropy(answers, b) + 0.05 * answers.softmax(-1).mean(0).square().sum()


@model("small balance, 0.001")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    answers = net.body(a)
    return F.cross_entropy(answers, b) + 0.001 * answers.softmax(-1).mean(0).square().sum()


@model("dice")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    p, t = net.body(a).sigmoid(), F.one_hot(b, 3)
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


@model("focal, by the count of a class")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    p = net.body(a).softmax(-1).gather(-1, b[:, None])[:, 0]
    return -((1 - p).square() * p.log()).sum() / (b == 2).sum().clamp(min=1)


@model("ranking")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    scores = net.body(a)[:, 0]
    signs = (b[:, None] - b[None, :]).sign()
    return F.relu(1 - (scores[:, None] - scores[None, :]) * signs).mean()


@model("variance and covariance", two)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    one, other = net.body(a), net.body(b)
    return F.mse_loss(one, other) + F.relu(1.0 - one.std(0)).mean()


@model("redundancy", two)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    one, other = (F.normalize(net.body(each), dim=0) for each in (a, b))
    return (one.T @ other - torch.eye(3, dtype=a.dtype)).square().sum()


@model("root of the mean square", two)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return (net.body(a) - b[:, :3]).square().mean().sqrt()


@model("soft prototypes")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    answers, t = net.body(a), F.one_hot(b, 3).to(a.dtype)
    middles = t.T @ answers / t.sum(0).clamp(min=1)[:, None]
    return F.cross_entropy(-torch.cdist(answers, middles), b)


@model("attention over the batch")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    h = net.part(0)(a)
    return F.cross_entropy(net.part(2)(F.scaled_dot_product_attention(h, h, h)), b)


@model("moving average kept")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    answers = net.body(a)
    with torch.no_grad():
        net.buffer.mul_(0.9).add_(0.1 * answers.mean(0))
    return F.cross_entropy(answers - net.buffer, b)


@model("queue of answers")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    answers = net.body(a)
    net.queue = [*net.queue, answers.detach()][-2:]
    return F.cross_entropy(answers - torch.cat(net.queue).mean(0), b)


@model("loss kept for later", truth=False)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    answers = net.body(a)
    net.kept = answers.square().mean()
    return F.cross_entropy(answers, b)


def entries(quick: bool = False) -> Iterator[Entry]:
    """Yield the models; with ``quick`` every sixth."""
    yield from list(ZOO.values())[:: 6 if quick else 1]
