// How Python's objects of the core end.
#pragma once

#include <pybind11/pybind11.h>

namespace llm_comm::python {

// What waits before it goes, for kernels up to their time-out or for partners: other threads must run then.
template <class T>
struct DeleteWithoutGil {
  void operator()(T* object) const {
    const pybind11::gil_scoped_release release;
    delete object;
  }
};

}  // namespace llm_comm::python
