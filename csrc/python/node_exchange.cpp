#include "python/node_exchange.h"

#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <vector>

#include "host/node_exchange.h"
#include "host/ucx/ucp_api.h"
#include "python/delete_without_gil.h"

namespace py = pybind11;
using namespace llm_comm::host;  // NOLINT: a binding file

namespace llm_comm::python {

using Holder = std::unique_ptr<NodeExchange, DeleteWithoutGil<NodeExchange>>;

void add_node_exchange(py::module_& module) {
  // Version of UCX. Raises RuntimeError if UCX is missing.
  module.def("ucx_version", &ucp::version);
  py::class_<NodeExchange, Holder>(module, "NodeExchange")
      .def(py::init([](uint32_t rank, uint32_t ranks, uint64_t part_bytes, double timeout_s, int device) {
             const py::gil_scoped_release others_may_run;
             const NodeExchangeOptions options{rank, ranks, part_bytes, timeout_s};
             auto made = device < 0 ? make_emulated_node_exchange(options) : make_cuda_node_exchange(options, device);
             return Holder(made.release());
           }),
           py::kw_only(), py::arg("rank"), py::arg("ranks"), py::arg("part_bytes"), py::arg("timeout_s"),
           py::arg("device"))  // -1: emulated
      .def("address", [](const NodeExchange& exchange) { return py::bytes(exchange.address()); })
      .def("connect", &NodeExchange::connect, py::arg("addresses"), py::arg("names"),
           py::call_guard<py::gil_scoped_release>())
      // `pieces`, by partner: offset in the input, bytes sent, offset in the output, bytes received.
      .def(
          "run",
          [](NodeExchange& exchange, uint64_t input, uint64_t output,
             const std::vector<std::array<uint64_t, 4>>& pieces, uint64_t stream) {
            std::vector<NodePiece> taken;
            for (const auto& piece : pieces) taken.push_back({piece[0], piece[1], piece[2], piece[3]});
            const py::gil_scoped_release others_may_run;
            return exchange.run(input, output, taken, stream);
          },
          py::arg("input"), py::arg("output"), py::arg("pieces"), py::arg("stream"))
      .def("set_limit", &NodeExchange::set_limit, py::arg("timeout_s"))
      .def("error", &NodeExchange::error)
      .def("abort", &NodeExchange::abort)
      .def("has_been_captured", &NodeExchange::has_been_captured)
      .def("close", &NodeExchange::close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace llm_comm::python
