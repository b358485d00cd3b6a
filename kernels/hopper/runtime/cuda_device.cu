// SPDX-License-Identifier: MIT
// Memory of one GPU: allocation outside the step, copies and fills on the caller's stream.
#include "kernels/core/error.h"
#include "kernels/hopper/runtime/cuda_check.h"
#include "kernels/hopper/runtime/cuda_device.h"
#include "kernels/hopper/runtime/cuda_timeline.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/runtime/work_graph.h"

namespace fp8flow {

using hopper::check_cuda;
using hopper::stream_of;

CudaDevice::CudaDevice(int device) : device_(device) { enter_thread(); }

void CudaDevice::enter_thread() { check_cuda(cudaSetDevice(device_), "selecting the GPU"); }

int64_t CudaDevice::free_bytes() const {
    std::size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "reading free memory");
    return static_cast<int64_t>(free);
}

void* CudaDevice::allocate(std::size_t bytes) {
    ++num_synchronisations_;
    void* data = nullptr;
    const cudaError_t status = cudaMalloc(&data, bytes == 0 ? 1 : bytes);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // the error is reported here, not at the next launch
        fail(ExitCode::memory,
             "out of GPU memory: requested {:.1f} MiB, {:.1f} MiB free; lower training.micro_batch_size or "
             "model.seq_length",
             static_cast<double>(bytes) / 1048576.0, static_cast<double>(free_bytes()) / 1048576.0);
    }
    check_cuda(status, "allocating GPU memory");
    return data;
}

void CudaDevice::free(void* data) {
    ++num_synchronisations_;
    cudaFree(data);
}

void CudaDevice::copy_in(void* device, const void* host, std::size_t bytes, Stream stream) {
    ++num_synchronisations_;
    copy_in_async(device, host, bytes, stream);
}

void CudaDevice::copy_out(void* host, const void* device, std::size_t bytes, Stream stream) {
    ++num_synchronisations_;
    copy_out_async(host, device, bytes, stream);
    check_cuda(cudaStreamSynchronize(stream_of(stream)), "waiting for a copy from the GPU");
}

void CudaDevice::copy(void* to, const void* from, std::size_t bytes, Stream stream) {
    if (bytes > 0)
        check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_of(stream)),
                   "copying on the GPU");
}

void CudaDevice::fill(void* device, uint8_t value, std::size_t bytes, Stream stream) {
    if (bytes > 0) check_cuda(cudaMemsetAsync(device, value, bytes, stream_of(stream)), "filling GPU memory");
}

void CudaDevice::synchronize() {
    ++num_synchronisations_;
    check_cuda(cudaDeviceSynchronize(), "waiting for the GPU");
}

void* CudaDevice::allocate_host(std::size_t bytes) {
    ++num_synchronisations_;
    void* data = nullptr;
    const cudaError_t status = cudaMallocHost(&data, bytes == 0 ? 1 : bytes);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        fail(ExitCode::memory, "out of page-locked host memory: requested {:.1f} MiB",
             static_cast<double>(bytes) / 1048576.0);
    }
    check_cuda(status, "allocating page-locked host memory");
    return data;
}

void CudaDevice::free_host(void* data) {
    ++num_synchronisations_;
    cudaFreeHost(data);
}

void CudaDevice::copy_in_async(void* device, const void* host, std::size_t bytes, Stream stream) {
    if (bytes > 0)
        check_cuda(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_of(stream)),
                   "copying to the GPU");
}

void CudaDevice::copy_out_async(void* host, const void* device, std::size_t bytes, Stream stream) {
    if (bytes > 0)
        check_cuda(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_of(stream)),
                   "copying from the GPU");
}

// The host sleeps in wait() instead of spinning: it waits for most of a step, and the hosts of other ranks
// may share its core.
Event CudaDevice::make_event() {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
               "creating an event");
    return {event};
}

void CudaDevice::free_event(Event event) { cudaEventDestroy(static_cast<cudaEvent_t>(event.handle)); }

void CudaDevice::record(Event event, Stream stream) {
    check_cuda(cudaEventRecord(static_cast<cudaEvent_t>(event.handle), stream_of(stream)),
               "recording an event");
}

bool CudaDevice::has_passed(Event event) {
    const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(event.handle));
    if (status == cudaErrorNotReady) {
        cudaGetLastError();  // an answer, not an error for the next launch to find
        return false;
    }
    check_cuda(status, "querying an event");
    return true;
}

void CudaDevice::wait(Event event) {
    ++num_waits_;
    check_cuda(cudaEventSynchronize(static_cast<cudaEvent_t>(event.handle)), "waiting for an event");
}

// Work on the legacy stream does not wait for it.
Stream CudaDevice::make_stream(Priority priority) {
    int least = 0, greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "reading stream priorities");
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                            priority == Priority::urgent ? greatest : least),
               "creating a stream");
    return {stream};
}

// Work on the legacy stream waits for it and the other way round.
Stream CudaDevice::make_ordered_stream() {
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreate(&stream), "creating a stream");
    return {stream};
}

std::unique_ptr<WorkGraph> CudaDevice::capture(Stream stream, const std::function<void()>& work) {
    return hopper::capture_work(stream_of(stream), work);
}

void CudaDevice::free_stream(Stream stream) { cudaStreamDestroy(stream_of(stream)); }

void CudaDevice::follow(Stream stream, Event event) {
    check_cuda(cudaStreamWaitEvent(stream_of(stream), static_cast<cudaEvent_t>(event.handle)),
               "ordering two streams");
}

std::unique_ptr<Timeline> CudaDevice::make_timeline() { return make_cuda_timeline(); }

}  // namespace fp8flow
