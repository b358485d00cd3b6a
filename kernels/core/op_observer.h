// SPDX-License-Identifier: MIT
// OpObserver: called at every call of Ops and Exchange with its cost (the stage timer is one). Ops and
// Exchange hold a pointer to one, null by default: then it costs one branch.
#pragma once

#include <cstdint>

namespace fp8flow {

// Which part of the machine bounds an op's arithmetic.
enum class Unit : uint8_t { vector, bf16_mma, fp8_mma };

// Bytes an op must move between memory and chip and floating-point operations it must do, from its shapes (of
// routed rows, the valid ones where the host knows them, RowGroups::known_rows, or else the row capacity).
struct OpCost {
    double bytes = 0;  // read and written
    double flops = 0;
    Unit unit = Unit::vector;
    double written = 0;  // of the bytes
};

struct OpCall {
    const char* op = "";  // a string literal
    OpCost cost;
    bool cast = false;  // a stand-alone quantiser of activations
};

class OpObserver {
public:
    virtual void op_called(const OpCall& call) = 0;
    // A whole exchange call. Its ops are reported between exchange_began and exchange_ended.
    virtual void exchange_began(const OpCall& call) = 0;
    virtual void exchange_ended(double wire_bytes) = 0;  // that left this rank; 0: counted on the device

protected:
    ~OpObserver() = default;
};

}  // namespace fp8flow
