#include "cuda_module.h"

#include <unordered_map>

namespace tilekern {
namespace {

// Every live cubin by its image, which the key views. The registry is never destroyed; see
// GetDriver.
struct Registry {
  std::mutex mutex;
  std::unordered_map<std::string_view, std::weak_ptr<Cubin>> cubins;
};

Registry& GetRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

}  // namespace

std::shared_ptr<Cubin> Cubin::Share(std::string_view image) {
  Registry& registry = GetRegistry();
  std::lock_guard lock(registry.mutex);
  const auto entry = registry.cubins.find(image);
  if (entry != registry.cubins.end()) {
    if (std::shared_ptr<Cubin> cubin = entry->second.lock()) return cubin;
    registry.cubins.erase(entry);  // its key views a cubin that is being destroyed
  }
  std::shared_ptr<Cubin> cubin(new Cubin(image));
  registry.cubins.emplace(cubin->image_, cubin);
  return cubin;
}

Or<CUmodule> Cubin::Load(const Driver& driver, CUcontext context) {
  std::lock_guard lock(mutex_);
  for (const Loaded& loaded : loaded_) {
    if (loaded.context == context) return loaded.module;
  }
  Loaded loaded{context, 0, nullptr};
  if (CUresult error = driver.cuCtxGetDevice(&loaded.device)) {
    return "cuCtxGetDevice: " + driver.Text(error);
  }
  if (CUresult error = driver.cuModuleLoadData(&loaded.module, image_.data())) {
    return "cuModuleLoadData of " + std::to_string(image_.size()) + " bytes: " + driver.Text(error);
  }
  loaded_.push_back(loaded);
  return loaded.module;
}

Cubin::~Cubin() {
  {
    Registry& registry = GetRegistry();
    std::lock_guard lock(registry.mutex);
    const auto entry = registry.cubins.find(image_);
    // Another thread may have inserted a new object of the same cubin in the meantime.
    if (entry != registry.cubins.end() && entry->second.expired()) registry.cubins.erase(entry);
  }
  if (loaded_.empty()) return;
  const Driver& driver = std::get<Driver>(GetDriver());
  RelaxedCapture relaxed(driver);
  for (const Loaded& loaded : loaded_) {
    // A destroyed context has unloaded its modules, and its handle is invalid. So at process exit,
    // or after a device reset, the module is not unloaded. XLA's contexts are primary contexts.
    unsigned flags = 0;
    int active = 0;
    if (driver.cuDevicePrimaryCtxGetState(loaded.device, &flags, &active) || !active) continue;
    if (driver.cuCtxPushCurrent(loaded.context)) continue;
    driver.cuModuleUnload(loaded.module);
    CUcontext popped;
    driver.cuCtxPopCurrent(&popped);
  }
}

}  // namespace tilekern
