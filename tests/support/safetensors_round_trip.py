"""The other side of the round trip with the Python package `safetensors`; tests/unit/model/safetensors/safetensors_python_test.cpp runs it.

write FILE: writes a file with the package.  check FILE: reads one of ours with the package and compares.
Tensor i of dtype d, shape s holds the bytes (31 * j + 7 * i + 1) % 256.
"""

import ctypes
import sys

try:
    import safetensors
except ImportError:
    sys.exit(77)

# the format's name, the package's name for writing, bytes of an element
DTYPES = [
    ("BOOL", "bool", 1), ("U8", "uint8", 1), ("I8", "int8", 1), ("F8_E5M2", "float8_e5m2", 1),
    ("F8_E4M3", "float8_e4m3fn", 1), ("F8_E8M0", "float8_e8m0fnu", 1), ("I16", "int16", 2), ("U16", "uint16", 2),
    ("F16", "float16", 2), ("BF16", "bfloat16", 2), ("I32", "int32", 4), ("U32", "uint32", 4), ("F32", "float32", 4),
    ("I64", "int64", 8), ("U64", "uint64", 8), ("F64", "float64", 8),
]
SHAPES = [[], [3], [2, 5], [0]]
METADATA = {"format": "pt", "made by": "tests"}


def tensors():
    index = 0
    for name, package_name, width in DTYPES:
        for shape in SHAPES:
            count = width
            for dim in shape:
                count *= dim
            data = bytes((31 * j + 7 * index + 1) % 256 for j in range(count))
            yield f"{name}.{len(shape)}.{index}", name, package_name, shape, data
            index += 1


def write(path):
    keep, content = [], {}
    for key, _, package_name, shape, data in tensors():
        if hasattr(safetensors, "TensorSpec"):
            buffer = ctypes.create_string_buffer(data, max(len(data), 1))
            keep.append(buffer)
            content[key] = safetensors.TensorSpec(
                dtype=package_name, shape=shape, data_ptr=ctypes.addressof(buffer), data_len=len(data))
        else:
            content[key] = {"dtype": package_name, "shape": shape, "data": data}
    safetensors.serialize_file(content, path, METADATA)


def check(path):
    with open(path, "rb") as file:
        found = dict(safetensors.deserialize(file.read()))
    for key, name, _, shape, data in tensors():
        got = found.pop(key)
        if (got["dtype"], list(got["shape"]), bytes(got["data"])) != (name, shape, data):
            sys.exit(f"{key}: got {got}, want {name} {shape} {data}")
    if found:
        sys.exit(f"not written by us: {sorted(found)}")


{"write": write, "check": check}[sys.argv[1]](sys.argv[2])
