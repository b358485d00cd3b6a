# SPDX-License-Identifier: MIT
# Compiler flags of all our targets, carried by the interface library fp8flow_flags.
add_library(fp8flow_flags INTERFACE)

# Arithmetic is the same in every build: no implicit contraction (explicit fma only), AVX2 + FMA as the baseline,
# because at the x86-64 baseline an explicit fma is a library call.
set(fp8flow_host_options -march=x86-64-v3 -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra
    -Wno-missing-field-initializers)  # optional fields of argument structs are left out by designated initialisers
if(FP8FLOW_WERROR)
    # Warnings of GCC's optimiser passes come and go with inlining and have known false positives: shown, not fatal.
    list(APPEND fp8flow_host_options -Werror -Wno-error=restrict -Wno-error=maybe-uninitialized
         -Wno-error=array-bounds -Wno-error=stringop-overflow)
endif()
# Two families of false positives in the standard library's own headers, silenced for the release that prints them:
# -Wrestrict where std::string is inlined (GCC bug 105651), and -Wstringop-overflow on inlined memset.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 12
   AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    list(APPEND fp8flow_host_options -Wno-restrict)
elseif(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13
       AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
    list(APPEND fp8flow_host_options -Wno-stringop-overflow)
endif()
if(FP8FLOW_SANITIZE)
    list(APPEND fp8flow_host_options -Wno-maybe-uninitialized)  # instrumented code sets it off in the standard library
    set(fp8flow_sanitize_options -fsanitize=${FP8FLOW_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_compile_options(fp8flow_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${fp8flow_sanitize_options}>")
    target_link_options(fp8flow_flags INTERFACE ${fp8flow_sanitize_options})
endif()
target_compile_options(fp8flow_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${fp8flow_host_options}>")

# Device code follows the same rule (no contraction), so that host and device round alike. fmt 9 switches constexpr off
# under nvcc, half of it only in C++20; it works when left on.
list(JOIN fp8flow_host_options "," fp8flow_host_options_joined)
set(fp8flow_cuda_options -DFMT_USE_CONSTEXPR=1 -lineinfo -fmad=false --expt-relaxed-constexpr -Xcompiler=${fp8flow_host_options_joined})
if(FP8FLOW_WERROR)
    list(APPEND fp8flow_cuda_options -Werror=all-warnings)
endif()
if(FP8FLOW_FAST_COMPILE)
    list(APPEND fp8flow_cuda_options -Ofc=max -DFP8FLOW_FAST_COMPILE)
endif()
target_compile_options(fp8flow_flags INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:${fp8flow_cuda_options}>")
