// The multicast object of a communicator, by driver functions of CUDA 12.1. The requirements of CUDA's documentation
// ("Multicast Object Management" and "Virtual Memory Management" of the driver API), and the function that meets each:
//
//   D1  Query CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: the constructor, before it looks up any multicast function.
//   D2  CUmulticastObjectProp: numDevices is the number of ranks. handleTypes lists every exported kind of handle.
//       size is a multiple of cuMulticastGetGranularity(MINIMUM) and should be one of (RECOMMENDED): properties() and
//       require_multiple(). Workspaces are rounded to MINIMUM, because RECOMMENDED is 512 MiB on some devices.
//   D3  One process creates the object and exports it by cuMemExportToShareableHandle. The others import it by
//       cuMemImportFromShareableHandle: create(), join(). A descriptor may be closed after the import.
//   D4  cuMulticastAddDevice adds every device, permanently, before memory is bound or the object is mapped.
//       cuMulticastBindMem and cuMemMap block until all devices are added. The ranks therefore vote between
//       add_device() and bind(): a rank that fails before the vote leaves no other rank blocked.
//   D5  cuMulticastBindMem: size and both offsets are multiples of the granularity, within object and allocation. The
//       allocation was made on one of the devices. An exported or imported object accepts only exportable memory
//       (DeviceMemory::allocate requests it). Flags are 0: bind().
//   D6  cuMemMap of the object: address, size and offset are aligned to the granularity, so the range is reserved with
//       that alignment. Mappings begin without access; cuMemSetAccess grants it to this rank's device: bind().
//   D7  No multicast access before every rank has bound its memory: the ranks vote after bind().
//   D8  Order of the end: cuMemUnmap with the size of cuMemMap; cuMemAddressFree with the reserved range;
//       cuMulticastUnbind with the offset and size of the bind (anything else is undefined); cuMemRelease once for each
//       create or import: drop(). The owner frees the bound allocation after that. The order of unmap and unbind is not
//       documented. The mapping goes first, so that no address refers to unbound memory.
//   D9  Peers may still reduce from this rank's memory after its own kernels have ended. CoreImpl waits for the peers,
//       within the time-out, before it drops the object.
#include "host/cuda/multicast_memory.h"

#include <stdexcept>
#include <utility>

#include "host/multicast_switches.h"

namespace llm_comm::host {

struct MulticastMemory::Functions {
  decltype(&cuGetErrorString) get_error_string;
  decltype(&cuDeviceGet) device_get;
  decltype(&cuDeviceGetAttribute) device_get_attribute;
  decltype(&cuMemExportToShareableHandle) mem_export;
  decltype(&cuMemImportFromShareableHandle) mem_import;
  decltype(&cuMemAddressReserve) mem_address_reserve;
  decltype(&cuMemAddressFree) mem_address_free;
  decltype(&cuMemMap) mem_map;
  decltype(&cuMemUnmap) mem_unmap;
  decltype(&cuMemSetAccess) mem_set_access;
  decltype(&cuMemRelease) mem_release;
  decltype(&cuMulticastGetGranularity) multicast_get_granularity;
  decltype(&cuMulticastCreate) multicast_create;
  decltype(&cuMulticastAddDevice) multicast_add_device;
  decltype(&cuMulticastBindMem) multicast_bind_mem;
  decltype(&cuMulticastUnbind) multicast_unbind;
};

namespace {

constexpr CUmemAllocationHandleType kHandleType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

template <class Function>
void load(const MulticastDriver& driver, Function& function, const char* name) {
  function = reinterpret_cast<Function>(driver.load(name));
}

void require_multiple(uint64_t bytes, uint64_t granularity) {
  if (granularity == 0 || bytes == 0 || bytes % granularity != 0) {
    throw std::runtime_error("a workspace of " + std::to_string(bytes) + " bytes is no multiple of " +
                             std::to_string(granularity) + " bytes, the granularity of multicast objects");
  }
}

}  // namespace

MulticastMemory::MulticastMemory(const MulticastDriver& driver, int device, int world_size)
    : functions_(std::make_unique<Functions>()), ordinal_(device), world_size_(static_cast<unsigned>(world_size)) {
  require_multicast_permitted(driver.get_variable);
  Functions& found = *functions_;
  load(driver, found.get_error_string, "cuGetErrorString");
  load(driver, found.device_get, "cuDeviceGet");
  load(driver, found.device_get_attribute, "cuDeviceGetAttribute");
  check(found.device_get(&device_, ordinal_), "cuDeviceGet");
  int is_supported = 0;
  check(found.device_get_attribute(&is_supported, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, device_),
        "cuDeviceGetAttribute(MULTICAST_SUPPORTED)");
  if (is_supported == 0) throw std::runtime_error("the device has no NVLink multicast");
  load(driver, found.mem_export, "cuMemExportToShareableHandle");
  load(driver, found.mem_import, "cuMemImportFromShareableHandle");
  load(driver, found.mem_address_reserve, "cuMemAddressReserve");
  load(driver, found.mem_address_free, "cuMemAddressFree");
  load(driver, found.mem_map, "cuMemMap");
  load(driver, found.mem_unmap, "cuMemUnmap");
  load(driver, found.mem_set_access, "cuMemSetAccess");
  load(driver, found.mem_release, "cuMemRelease");
  load(driver, found.multicast_get_granularity, "cuMulticastGetGranularity");
  load(driver, found.multicast_create, "cuMulticastCreate");
  load(driver, found.multicast_add_device, "cuMulticastAddDevice");
  load(driver, found.multicast_bind_mem, "cuMulticastBindMem");
  load(driver, found.multicast_unbind, "cuMulticastUnbind");
}

MulticastMemory::~MulticastMemory() { drop(); }

void MulticastMemory::check(CUresult error, const char* what) const {
  if (error == CUDA_SUCCESS) return;
  const char* text = nullptr;
  functions().get_error_string(error, &text);
  throw std::runtime_error(std::string(what) + ": " + (text != nullptr ? text : "unknown driver error"));
}

CUmulticastObjectProp MulticastMemory::properties(uint64_t bytes) const {
  CUmulticastObjectProp properties{};
  properties.numDevices = world_size_;
  properties.size = bytes;
  properties.handleTypes = kHandleType;
  return properties;
}

uint64_t MulticastMemory::granularity(uint64_t bytes) const {
  const CUmulticastObjectProp of = properties(bytes);
  size_t granularity = 0;
  check(functions().multicast_get_granularity(&granularity, &of, CU_MULTICAST_GRANULARITY_MINIMUM),
        "cuMulticastGetGranularity");
  return granularity;
}

WorkspaceHandle MulticastMemory::create(uint64_t bytes) {
  require_multiple(bytes, granularity(bytes));
  const CUmulticastObjectProp of = properties(bytes);
  check(functions().multicast_create(&object_, &of), "cuMulticastCreate");
  has_object_ = true;
  bytes_ = bytes;
  WorkspaceHandle handle;
  check(functions().mem_export(&handle.fd, object_, kHandleType, 0), "cuMemExportToShareableHandle");
  return handle;
}

void MulticastMemory::join(uint64_t bytes, const WorkspaceHandle& handle) {
  require_multiple(bytes, granularity(bytes));
  check(functions().mem_import(&object_, reinterpret_cast<void*>(static_cast<uintptr_t>(handle.fd)), kHandleType),
        "cuMemImportFromShareableHandle");
  has_object_ = true;
  bytes_ = bytes;
}

void MulticastMemory::add_device() {
  if (!has_object_) throw std::runtime_error("there is no multicast object to add a device to");
  check(functions().multicast_add_device(object_, device_), "cuMulticastAddDevice");
}

char* MulticastMemory::bind(CUmemGenericAllocationHandle workspace, uint64_t bytes) {
  if (!has_object_ || bytes != bytes_) {
    throw std::runtime_error("there is no multicast object for a workspace of " + std::to_string(bytes) + " bytes");
  }
  check(functions().multicast_bind_mem(object_, 0, workspace, 0, bytes_, 0), "cuMulticastBindMem");
  is_bound_ = true;
  check(functions().mem_address_reserve(&address_, bytes_, granularity(bytes_), 0, 0), "cuMemAddressReserve");
  check(functions().mem_map(address_, bytes_, 0, object_, 0), "cuMemMap");
  is_mapped_ = true;
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = ordinal_;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  check(functions().mem_set_access(address_, bytes_, &access, 1), "cuMemSetAccess");
  return reinterpret_cast<char*>(address_);
}

void MulticastMemory::drop() noexcept {
  if (std::exchange(is_mapped_, false)) functions().mem_unmap(address_, bytes_);
  if (address_ != 0) functions().mem_address_free(std::exchange(address_, 0), bytes_);
  if (std::exchange(is_bound_, false)) functions().multicast_unbind(object_, device_, 0, bytes_);
  if (std::exchange(has_object_, false)) functions().mem_release(object_);
}

}  // namespace llm_comm::host
