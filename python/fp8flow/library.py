# SPDX-License-Identifier: MIT
"""The C interface of libfp8flow (include/fp8flow/c.h) through ctypes: its structs, calls that raise, one context a device."""
import contextlib
import ctypes
import os
import pathlib
import threading

import torch

C_VERSION = 2  # FP8FLOW_C_VERSION of the header that this file repeats

int32, int64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class Error(RuntimeError):
    """A call that failed; `status` as enum fp8flow_status."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class Sized(ctypes.Structure):
    """A struct of the interface: its size first, reserved words of 0 last."""

    def __init__(self, *values, **named):
        super().__init__(ctypes.sizeof(self), *values, **named)


def sized(*fields, reserved=4):
    return [("size", ctypes.c_size_t), *fields, ("reserved", int64 * reserved)]


class CTensor(Sized):
    _fields_ = sized(("data", pointer), ("dtype", int32), ("rank", int32), ("dims", int64 * 4))


class CScaled(Sized):
    _fields_ = sized(("codes", CTensor), ("scales", CTensor), ("layout", int32), ("scale_format", int32))


class CGroups(Sized):
    _fields_ = sized(("num_groups", int64), ("counts", pointer), ("offsets", pointer), ("row_capacity", int64), ("alignment", int64))


class CPlan(Sized):
    _fields_ = sized(("groups", CGroups), ("row_source", pointer), ("row_prob", pointer), ("token_rows", pointer),
                     ("token_offsets", pointer), ("tokens", int64), ("choices", int64))


class CLayerSpec(Sized):
    _fields_ = sized(("hidden_size", int64), ("ffn_hidden_size", int64), ("num_experts", int64), ("topk", int64), ("max_tokens", int64),
                     ("recipe", ctypes.c_char_p), ("topk_scaling", ctypes.c_double), ("pre_softmax", int32), ("weight_dtype", int32),
                     reserved=8)


class CWeights(Sized):  # fp8flow_layer_weights and fp8flow_layer_gradients
    _fields_ = sized(("router", pointer), ("w1", pointer), ("w2", pointer))


DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3, torch.float8_e5m2: 4, torch.float8_e8m0fnu: 5,
          torch.int32: 6, torch.int64: 7}
LAYOUTS = {None: 0, "vec128_wire": 3, "vec128": 4, "block128": 5, "tile128": 6}
SCALE_FORMATS = {"pow2": 1, "fp32": 2}  # 0: undeclared


def load():
    """The library of this package, or of the path in FP8FLOW_LIBRARY."""
    path = os.environ.get("FP8FLOW_LIBRARY") or str(pathlib.Path(__file__).parent / "libfp8flow.so")
    library = ctypes.CDLL(path)
    if library.fp8flow_c_version() < C_VERSION:
        raise ImportError(f"{path} has version {library.fp8flow_c_version()} of the C interface, this package needs {C_VERSION}")
    for name in ("last_error", "context_backend"):
        getattr(library, "fp8flow_" + name).restype = ctypes.c_char_p
    library.fp8flow_max_rows.restype = int64
    for name in ("context_destroy", "layer_destroy"):
        getattr(library, "fp8flow_" + name).restype = None
    return library


LIBRARY = load()


def run(function, *arguments):
    """Calls fp8flow_<function>; raises Error with its text where it fails."""
    status = getattr(LIBRARY, "fp8flow_" + function)(*arguments)
    if status != 0:
        raise Error(status, f"{function}: {LIBRARY.fp8flow_last_error().decode(errors='replace')}")


contexts, contexts_lock = {}, threading.Lock()


def current(device):
    """Inside, `device` is the current GPU; afterwards the one that was."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def context_of(device):
    """The context of a device; it lives as long as the process, since layers and streams may outlast any object here."""
    index = None if device.type == "cpu" else device.index
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"tensors are on {device}, want cpu or cuda")
    with contexts_lock:
        if index not in contexts:
            context = pointer()
            with current(device):
                run("context_create", b"reference" if index is None else b"hopper", index or 0, ctypes.byref(context))
            contexts[index] = context
        return contexts[index]


def call(function, device, *arguments):
    """fp8flow_<function>(arguments..., stream) on the current stream of `device`."""
    with current(device):
        stream = pointer(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else None
        run(function, *arguments, stream)


def tensor(value):
    """A CTensor on the memory of a torch tensor, which the caller has checked."""
    return CTensor(value.data_ptr(), DTYPES[value.dtype], value.dim(), (int64 * 4)(*value.shape))
