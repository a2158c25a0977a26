// What autograd and autocast ask of CUDA, answered without a device: fake tensors compute nothing,
// but a backward pass wants a device guard and the hooks, which a CPU build of torch lacks.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::EventFlag;
using c10::Stream;

struct NoGuard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getDefaultStream(Device) const override { return getStream(getDevice()); }
  Stream exchangeStream(Stream) const override { return getStream(getDevice()); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

struct NoHooks final : at::CUDAHooksInterface {
  NoHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

static c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, new NoGuard());
using at::CUDAHooksArgs;
using at::CUDAHooksInterface;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
using CUDAHooks = NoHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
