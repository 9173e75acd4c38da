// The multicast object of a communicator, by the driver (CUDA 12.1 and newer). What CUDA's documentation asks ("Multicast
// Object Management" and "Virtual Memory Management" of the driver API), and where it is done:
//
//   D1  Ask CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of the device: the constructor, before anything of multicast is looked up.
//   D2  CUmulticastObjectProp: numDevices is the size of the team; handleTypes has every kind of handle that is exported;
//       size is a multiple of cuMulticastGetGranularity(MINIMUM), and should be one of (RECOMMENDED): properties() and
//       require_multiple(). The workspaces are rounded to MINIMUM: RECOMMENDED is 512 MiB on some devices.
//   D3  One process creates the object, exports it by cuMemExportToShareableHandle, and the others import it by
//       cuMemImportFromShareableHandle: create(), join(). A descriptor may be closed when it has been imported.
//   D4  Every device of the team is added by cuMulticastAddDevice, permanently, before any memory is bound or the object
//       is mapped: cuMulticastBindMem and cuMemMap block until all have been. So the ranks vote between add_device() and
//       bind(), and a rank that fails before it leaves nobody in such a call.
//   D5  cuMulticastBindMem: size and both offsets are multiples of the granularity, within the object and the allocation, which
//       was made on a device of the team. An exported or imported object takes only memory that can be exported itself
//       (DeviceMemory::allocate asks for such). Flags are 0: bind().
//   D6  cuMemMap of the object: address, size and offset are aligned to the granularity, so the range is reserved with that
//       alignment. cuMemSetAccess then, for this rank's device, since mappings begin without access: bind().
//   D7  No multicast access before every rank has bound its memory: the ranks vote after bind().
//   D8  At the end cuMemUnmap with the size of cuMemMap; cuMemAddressFree with the range that was reserved;
//       cuMulticastUnbind with the offset and the size of the bind, anything else is undefined; cuMemRelease, once for each
//       create or import. The bound allocation is released after that, by its owner. The order of unmap and unbind is not
//       documented: the mapping goes first, so that no address leads to memory that is bound no more: drop().
//   D9  Peers may still reduce from this rank's memory when its own kernels have ended: CoreImpl waits for them, as far as
//       the time limit goes, before the object is dropped.
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
