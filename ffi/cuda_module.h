// A cubin, loaded at most once into each context of the process.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_driver.h"

namespace tilekern {

class Cubin {
 public:
  // Returns the one object for a cubin, so that call sites of the same kernel share a module.
  static std::shared_ptr<Cubin> Share(std::string_view image);

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

  explicit Cubin(std::string_view image) : image_(image) {}

  const std::string image_;
  std::mutex mutex_;
  std::vector<Loaded> loaded_;
};

}  // namespace tilekern
