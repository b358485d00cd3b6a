// SPDX-License-Identifier: MIT
// The objects that the handles of include/fp8flow/c.h point to, and the frame around every call: one at a
// time on a context, in order with the call before whatever their streams are, and errors as a status with a
// text.
#pragma once

#include "kernels/backends/backends.h"
#include "kernels/core/arena.h"
#include "kernels/core/error.h"
#include "layers/lone/lone_layer.h"

#include <fp8flow/c.h>

#include <memory>
#include <mutex>
#include <vector>

struct fp8flow_context {
    fp8flow_context(fp8flow::BackendKind kind, int device);
    ~fp8flow_context();
    fp8flow_context(const fp8flow_context&) = delete;
    fp8flow_context& operator=(const fp8flow_context&) = delete;

    fp8flow::Ops& ops() const { return *backend.ops; }

    std::mutex mutex;
    fp8flow::Backend backend;
    std::vector<std::unique_ptr<fp8flow::ProcessGroup>> ranks;  // one
    fp8flow::Arena scratch;                                     // inside a call
    fp8flow::Event done;                                        // of the last call
    void* stream = nullptr;                                     // of the last call
};

struct fp8flow_layer {
    fp8flow_layer(fp8flow_context& context, const fp8flow::LoneLayerSpec& spec, fp8flow::DType weight_dtype);

    fp8flow_context& context;
    fp8flow::DType weight_dtype;
    int64_t hidden_size;
    std::unique_ptr<fp8flow::Exchange> exchange;
    fp8flow::LoneLayer layer;
    bool has_weights = false;
    int64_t tokens = -1;  // of the forward that a backward may follow
};

namespace fp8flow::bindings {

// Runs `body` and turns what it throws into a status and the text of fp8flow_last_error.
int guarded(void (*body)(void*), void* argument);
template <class Body> int guarded(Body body) {
    return guarded([](void* argument) { (*static_cast<Body*>(argument))(); }, &body);
}

// A struct of the caller's. A program built against version 1 has no size there, but a pointer or a number.
template <class T> const T& given(const T* argument, const char* what) {
    require(argument != nullptr, ExitCode::usage, "{} is null", what);
    require(
        argument->size == sizeof(T), ExitCode::usage,
        "{}: size is {}, want {}: the program was built against another version of the C interface than {}, "
        "or left size unset",
        what, argument->size, sizeof(T), FP8FLOW_C_VERSION);
    for (const int64_t word : argument->reserved)
        require(word == 0, ExitCode::usage, "{}: a reserved word is {}, want 0", what, word);
    return *argument;
}

// The context to itself, its device current, and `stream` after the call before. When it ends, the next call
// follows what this one gave to the stream.
class ContextLock {
public:
    ContextLock(fp8flow_context& context, void* stream);
    ~ContextLock();
    ContextLock(const ContextLock&) = delete;
    ContextLock& operator=(const ContextLock&) = delete;
    Launch launch() const { return {.stream = {stream_}}; }

private:
    fp8flow_context& context_;
    std::scoped_lock<std::mutex> lock_;
    void* stream_;
};

// body(ops, launch) with the lock of the context.
template <class Body> int call(fp8flow_context* context, void* stream, Body body) {
    return guarded([&] {
        require(context != nullptr, ExitCode::usage, "the context is null");
        const ContextLock lock(*context, stream);
        body(context->ops(), lock.launch());
    });
}

}  // namespace fp8flow::bindings
