// Temporary: weak definitions, so that op families can be built and tested before all of them have landed. Deleted once they have.
#include "kernels/ops.h"

namespace fp8flow {
#define FP8FLOW_WEAK(name, Args)                                  \
    __attribute__((weak)) void check(const op::Args&) {}          \
    __attribute__((weak)) OpCost cost(const op::Args&) { return {}; }
FP8FLOW_FOR_EACH_OP(FP8FLOW_WEAK)
FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_WEAK)
}  // namespace fp8flow
