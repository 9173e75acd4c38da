// How Python's objects of the core end.
#pragma once

#include <pybind11/pybind11.h>

#include "host/own_process.h"

namespace llm_comm::python {

// What waits before it goes, for kernels up to their time-out or for partners: other threads must run then. A forked child leaves its
// parent's objects alone: their threads are not there, and their locks may be held.
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
