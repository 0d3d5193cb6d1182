"""Loads are no wider than rows are aligned: only a device would fault on those that are."""

from dataclasses import replace

import pytest
from triton_aot import compile_case

from batchmla.kernels.triton import gqa_decode


@pytest.mark.parametrize(("unit", "is_wide"), [(1, False), (8, True)])
def test_rows_on_pages_are_read_by_their_stride(unit: int, is_wide: bool) -> None:
    """Records of 129 bytes come byte by byte, those of 1032 bytes by eight at a time, which
    asynchronous copies can do (from four on)."""
    case = next(case for case in gqa_decode.AOT_CASES if case.constants["IS_RECORD"])
    code = compile_case(replace(case, constants={**case.constants, "UNIT": unit}), 90)
    copies = code.counts["LDGSTS"]
    assert copies > 0 if is_wide else copies == 0, code
