// Temporary: weak definitions, so that op families can be built and tested before all of them have landed. Deleted once they have.
#include "kernels/reference/reference_ops.h"

namespace fp8flow {
#define FP8FLOW_WEAK(name, Args)                                                                       \
    __attribute__((weak)) void ReferenceOps::do_##name(const op::Args&, const Launch&) {               \
        fail(ExitCode::internal, "{} is not there yet", #name);                                        \
    }
FP8FLOW_FOR_EACH_OP(FP8FLOW_WEAK)
}  // namespace fp8flow
