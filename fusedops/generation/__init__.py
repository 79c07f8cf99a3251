"""Text from a trained model: incremental inference, sampling, beams (``docs/generation.md``)."""

from fusedops.generation.decoder import Decoder
from fusedops.generation.options import Generated, NonFiniteLogitsError, Options, Token
from fusedops.generation.sequences import generate, stream

__all__ = ["Decoder", "Generated", "NonFiniteLogitsError", "Options", "Token", "generate", "stream"]
