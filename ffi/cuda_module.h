// A cubin, loaded at most once into each context of the process.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "packed_cubin.h"

namespace tilekern {

class Cubin {
 public:
  // Returns the one object for a cubin, so that call sites of the same kernel share a module, or an
  // error if it cannot be unpacked.
  static Or<std::shared_ptr<Cubin>> Share(const PackedCubin& packed);

  ~Cubin();
  Cubin(const Cubin&) = delete;
  Cubin& operator=(const Cubin&) = delete;

  // Returns the module in `context`, which is current. The first call loads it, under
  // RelaxedCapture.
  Or<CUmodule> Load(const Driver& driver, CUcontext context);

 private:
  struct Loaded {
    CUcontext context;
    CUdevice device;
    CUmodule module;
  };

  Cubin(std::string_view packed, std::string image) : packed_(packed), image_(std::move(image)) {}

  const std::string packed_, image_;
  std::mutex mutex_;
  std::vector<Loaded> loaded_;
};

}  // namespace tilekern
