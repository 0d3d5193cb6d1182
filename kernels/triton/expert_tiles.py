"""How products over sorted tokens are cut into tiles. T rows of a tile, O outputs, K inputs of a
step."""

from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

TOKENS = (16, 32, 64, 128)  # rows that a tile may have
MANY = TOKENS[-1]
EXACT_TOKENS = 32
BOX_ALIGNMENT = 16  # bytes, of a row of a matrix that is read in boxes
BOX_CAPABILITY = 9  # the first with hardware that copies boxes


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """One way to cut a product. `is_swapped`: outputs are the rows of the tensor cores' product,
    which come in 64s, and tokens its columns, which come in 8s: for few tokens an expert. A gated
    product has `block_o` gates and as many ups."""

    block_t: int
    block_o: int
    block_k: int
    is_swapped: bool
    num_warps: int
    num_stages: int


def pick_tokens(rows_per_expert: float, dtype: torch.dtype, *, is_exact: bool) -> int:
    """Rows of a tile: room for twice the mean, as experts are not chosen evenly. If exact, always
    as many; and float32 has one kind of tile."""
    if dtype == torch.float32:
        return TOKENS[0]
    if is_exact:
        return EXACT_TOKENS
    return next((tokens for tokens in TOKENS if 2 * rows_per_expert <= tokens), TOKENS[-1])


def boxes(
    matrices_EOK: torch.Tensor, shape: TileShape, block_k: int | None = None
) -> TensorDescriptor | torch.Tensor:
    """A stack as one tall matrix that is read in boxes [block_o, block_k], where the device and the
    row length allow it; else as it is. On a CPU, in the interpreter, they are allowed."""
    tall_OK = matrices_EOK.reshape(-1, matrices_EOK.shape[-1])
    is_aligned = (
        tall_OK.stride(0) * tall_OK.itemsize % BOX_ALIGNMENT == 0
        and tall_OK.data_ptr() % BOX_ALIGNMENT == 0
    )
    if not is_aligned or not _reads_boxes(tall_OK.device):
        return tall_OK
    return TensorDescriptor.from_tensor(tall_OK, [shape.block_o, block_k or shape.block_k])


def _reads_boxes(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    major, _ = torch.cuda.get_device_capability(device)
    return major >= BOX_CAPABILITY
