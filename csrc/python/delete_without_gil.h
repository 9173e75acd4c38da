// Deleter for core objects owned by Python.
#pragma once

#include <pybind11/pybind11.h>

#include "host/own_process.h"

namespace llm_comm::python {

// Releases the GIL during destruction, because it may wait: for kernels up to their time-out, or for partners. Other
// threads must run meanwhile. A forked child does not destroy its parent's objects: their threads do not exist there,
// and their locks may be held.
template <class T>
class DeleteWithoutGil {
 public:
  void operator()(T* object) const {
    if (!maker_.is_this()) return;
    const pybind11::gil_scoped_release release;
    delete object;
  }

 private:
  host::OwnProcess maker_;
};

}  // namespace llm_comm::python
