"""``autofit serve``: searches for several users, over HTTP, on a Ray cluster.

The state is in the store alone. Each search runs in one detached actor of Ray, so the service may
end and start again at any moment.
"""
