# SPDX-License-Identifier: MIT
"""Every test runs on CPU tensors, and on a GPU where the library can use one."""
import pytest
import torch

import fp8flow


def devices():
    found = [torch.device("cpu")]
    if torch.cuda.is_available():
        try:
            fp8flow.quantize_rows(torch.ones(1, 128, device="cuda"))
            found.append(torch.device("cuda", torch.cuda.current_device()))
        except fp8flow.Error as error:
            print(f"not on the GPU: {error}")
    return found


@pytest.fixture(params=devices(), ids=str)
def device(request):
    torch.manual_seed(1)
    return request.param
