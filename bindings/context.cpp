// SPDX-License-Identifier: MIT
// Contexts, their lock, and the one place where exceptions become a status.
#include "bindings/handles.h"
#include "kernels/core/error.h"

#include <new>
#include <string_view>

using namespace fp8flow;

fp8flow_context::fp8flow_context(BackendKind kind, int device)
    : backend(make_backend(kind, device)),
      ranks(make_thread_groups(1, 60)),
      scratch(ops().device(), "scratch"),
      done(ops().device().make_event()) {}

fp8flow_context::~fp8flow_context() {
    ops().device().enter_thread();
    ops().device().free_event(done);
}

namespace fp8flow::bindings {

namespace {

thread_local std::string last_error = "no call has failed";

// The text may be too long for what is left of memory.
int failed(ExitCode code, const char* text) noexcept {
    try {
        last_error = text;
    } catch (...) {
        last_error.clear();
    }
    return static_cast<int>(code);
}

}  // namespace

int guarded(void (*body)(void*), void* argument) {
    try {
        body(argument);
        return FP8FLOW_OK;
    } catch (const Error& error) {
        return failed(error.code(), error.what());
    } catch (const std::bad_alloc&) {
        return failed(ExitCode::memory, "the host has too little memory");
    } catch (const std::exception& error) {
        return failed(ExitCode::internal, error.what());
    } catch (...) {
        return failed(ExitCode::internal, "an exception of unknown type");
    }
}

ContextLock::ContextLock(fp8flow_context& context, void* stream)
    : context_(context), lock_(context.mutex), stream_(stream) {
    Device& device = context_.ops().device();
    device.enter_thread();
    if (stream_ != context_.stream) device.follow({stream_}, context_.done);
    context_.stream = stream_;
}

ContextLock::~ContextLock() {
    try {
        context_.ops().device().record(context_.done, {stream_});
    } catch (const Error&) {
        // a device that cannot record has failed, which the next call reports
    }
}

}  // namespace fp8flow::bindings

using namespace fp8flow::bindings;

int fp8flow_c_version() { return FP8FLOW_C_VERSION; }

const char* fp8flow_last_error() { return last_error.c_str(); }

int fp8flow_context_create(const char* backend, int device, fp8flow_context** context) {
    return guarded([&] {
        require(backend != nullptr && context != nullptr, ExitCode::usage, "backend or context is null");
        const std::string_view name = backend;
        const bool is_auto = name == "auto", is_hopper = name == "hopper";
        require(is_auto || is_hopper || name == "reference", ExitCode::usage,
                "backend is \"{}\", want auto, reference or hopper", name);
        *context = new fp8flow_context(is_auto     ? BackendKind::automatic
                                       : is_hopper ? BackendKind::hopper
                                                   : BackendKind::reference,
                                       device);
    });
}

void fp8flow_context_destroy(fp8flow_context* context) { delete context; }

const char* fp8flow_context_backend(const fp8flow_context* context) {
    return context->backend.kind == BackendKind::hopper ? "hopper" : "reference";
}
