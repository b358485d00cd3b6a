// SPDX-License-Identifier: MIT
// The tensors that each operation's arguments name, and one `call` for all operations, so that a test can
// copy arguments to a device and run any operation on any backend.
#pragma once

#include "kernels/ops.h"
#include "kernels/ops/fields.h"

namespace fp8flow::test {

// Calls f with every member that points to memory: TensorView&, ScaledTensor&, RowGroups& or const int64_t*&;
// inputs and outputs alike.
template <class Args, class F> void each_view(Args& args, F&& f) {
    op::each_field(args, [&](const char*, auto& member) {
        using Member = std::remove_reference_t<decltype(member)>;
        constexpr bool view = std::is_same_v<Member, TensorView> || std::is_same_v<Member, ScaledTensor> ||
                              std::is_same_v<Member, RowGroups> || std::is_same_v<Member, const int64_t*>;
        if constexpr (view) f(member);
        if constexpr (op::HasFields<Member>) each_view(member, f);
        if constexpr (std::is_same_v<Member, decltype(op::RouterTopKBackward::terms)> ||
                      std::is_same_v<Member, decltype(op::GroupedGemmWgrad::more)>)
            for (auto& part : member) each_view(part, f);
    });
}

#define FP8FLOW_CALL(name, Args) \
    inline void call(Ops& ops, const op::Args& args, const Launch& launch = {}) { ops.name(args, launch); }
FP8FLOW_FOR_EACH_OP(FP8FLOW_CALL)
FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_CALL)
#undef FP8FLOW_CALL

}  // namespace fp8flow::test
