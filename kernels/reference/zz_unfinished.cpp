// Temporary: weak definitions of the router ops, until they land. Only of these: the linker takes the first definition in an
// archive, weak or not. Deleted once they have.
#include "kernels/reference/reference_ops.h"

namespace fp8flow {
#define FP8FLOW_WEAK(name, Args)                                                         \
    __attribute__((weak)) void ReferenceOps::do_##name(const op::Args&, const Launch&) { \
        fail(ExitCode::internal, "{} is not there yet", #name);                          \
    }
FP8FLOW_WEAK(router_logits, RouterLogits)
FP8FLOW_WEAK(router_logits_backward, RouterLogitsBackward)
FP8FLOW_WEAK(router_top_k, RouterTopK)
FP8FLOW_WEAK(router_top_k_backward, RouterTopKBackward)
FP8FLOW_WEAK(router_score_sums, RouterScoreSums)
FP8FLOW_WEAK(router_aux_loss_backward, RouterAuxLossBackward)
FP8FLOW_WEAK(router_z_loss, RouterZLoss)
FP8FLOW_WEAK(expert_bias_update, ExpertBiasUpdate)
}  // namespace fp8flow
