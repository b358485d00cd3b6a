// SPDX-License-Identifier: MIT
// Which commit this program was built from; results carry it.
#pragma once

namespace fp8flow {

// "426a101", "426a101-dirty" where files differ from it, "unknown" outside a checkout.
const char* build_commit();

}  // namespace fp8flow
