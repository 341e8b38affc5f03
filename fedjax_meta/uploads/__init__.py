"""What happens to uploads between client and server: one transformation a file, put together in a chain.

Give them to a federation in order: `Federation(uploads=(clip(1.0), noise(0.8)))`. `check_order` says which orders are legal.
"""

from fedjax_meta.uploads.clip import adaptive_clip, clip
from fedjax_meta.uploads.mask import mask
from fedjax_meta.uploads.noise import noise
from fedjax_meta.uploads.quantize import quantize
from fedjax_meta.uploads.sparsify import sparsify
from fedjax_meta.uploads.transform import Chain, Message, ServerContext, UploadTransform, check_order, kinds

TRANSFORMATIONS = ("sparsify", "quantize", "clip", "adaptive_clip", "noise", "mask")
"""Names of all transformations."""

__all__ = [
    "TRANSFORMATIONS",
    "Chain",
    "Message",
    "ServerContext",
    "UploadTransform",
    "adaptive_clip",
    "check_order",
    "clip",
    "kinds",
    "mask",
    "noise",
    "quantize",
    "sparsify",
]
