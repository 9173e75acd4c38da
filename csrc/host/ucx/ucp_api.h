// The part of UCX's C API (libucp) that UcxTransport uses. The library is loaded by name at run time, so neither UCX
// nor its headers are needed to build.
//
// The struct layouts are those of UCP 1.14 to 1.22. UCX only appends fields to structs and reads only those named by a
// mask, so later versions accept them too. tests/port_channel/ucp_layout.cpp compares them with the headers where they
// are found.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace llm_comm::host::ucp {

// ---- Types ------------------------------------------------------------------------------------------------------

using Context = struct ContextOfUcx*;
using Worker = struct WorkerOfUcx*;
using Endpoint = struct EndpointOfUcx*;
using Memory = struct MemoryOfUcx*;
using RemoteKey = struct RemoteKeyOfUcx*;
using Options = struct OptionsOfUcx;
using WorkerAddress = struct WorkerAddressOfUcx;

// 0: done. 1: in progress. Negative: an error.
using Status = int8_t;
inline constexpr Status kOk = 0;
inline constexpr Status kInProgress = 1;

// Result of an asynchronous call: nullptr (done), an error, or a request whose callback will be called.
using StatusPointer = void*;
inline constexpr intptr_t kLastError = -100;
inline bool is_error(StatusPointer pointer) {
  return reinterpret_cast<uintptr_t>(pointer) >= static_cast<uintptr_t>(kLastError);
}
inline Status status_of(StatusPointer pointer) { return static_cast<Status>(reinterpret_cast<intptr_t>(pointer)); }

inline constexpr uint64_t kFeatureRma = 1 << 1;
inline constexpr uint64_t kParamsHaveFeatures = 1 << 0;
struct Params {
  uint64_t field_mask;
  uint64_t features;
  size_t request_size;
  void (*request_init)(void*);
  void (*request_cleanup)(void*);
  uint64_t tag_sender_mask;
  int mt_workers_shared;
  size_t estimated_num_eps;
  size_t estimated_num_ppn;
  const char* name;
  size_t node_local_id;
};

inline constexpr int kThreadsInTurn = 1;  // UCS_THREAD_MODE_SERIALIZED
inline constexpr uint64_t kWorkerParamsHaveThreadMode = 1 << 0;
struct WorkerParams {
  uint64_t field_mask;
  int thread_mode;
  unsigned long cpu_mask[1024 / (8 * sizeof(unsigned long))];
  unsigned events;
  void* user_data;
  int event_fd;
  uint64_t flags;
  const char* name;
  size_t am_alignment;
  uint64_t client_id;
};

inline constexpr uint64_t kWorkerAttrHasAddress = 1 << 1;
struct WorkerAttr {
  uint64_t field_mask;
  int thread_mode;
  uint32_t address_flags;
  WorkerAddress* address;
  size_t address_length;
  size_t max_am_header;
  char name[32];
  size_t max_debug_string;
};

inline constexpr uint64_t kMapHasAddress = 1 << 0;
inline constexpr uint64_t kMapHasLength = 1 << 1;
inline constexpr uint64_t kMapHasMemoryType = 1 << 4;
inline constexpr int kHostMemory = 0;
struct MapParams {
  uint64_t field_mask;
  void* address;
  size_t length;
  unsigned flags;
  unsigned prot;
  int memory_type;
  const void* exported_memh_buffer;
};

inline constexpr uint64_t kEndpointHasAddress = 1 << 0;
inline constexpr uint64_t kEndpointHasErrorMode = 1 << 1;
inline constexpr uint64_t kEndpointHasErrorHandler = 1 << 2;
inline constexpr int kErrorsOfPeers = 1;  // UCP_ERR_HANDLING_MODE_PEER
struct SocketAddress {
  const sockaddr* address;
  socklen_t length;
};
struct EndpointParams {
  uint64_t field_mask;
  const WorkerAddress* address;
  int error_mode;
  struct {
    void (*call)(void* argument, Endpoint, Status);
    void* argument;
  } error_handler;
  void* user_data;
  unsigned flags;
  SocketAddress socket_address;
  void* connection_request;
  const char* name;
  SocketAddress local_socket_address;
};

inline constexpr uint32_t kRequestHasCallback = 1 << 1;
inline constexpr uint32_t kRequestHasUserData = 1 << 2;
inline constexpr uint32_t kRequestHasFlags = 1 << 4;
inline constexpr uint32_t kRequestHasMemory = 1 << 8;
inline constexpr uint32_t kCloseByForce = 1 << 0;
struct RequestParam {
  uint32_t op_attr_mask;
  uint32_t flags;
  void* request;
  void (*callback)(void* request, Status, void* user_data);
  uint64_t datatype;
  void* user_data;
  void* reply_buffer;
  int memory_type;
  void* recv_info;
  Memory memory;
  uint64_t remote_datatype;
  const void* remote;
  size_t remote_count;
};

// ---- Functions --------------------------------------------------------------------------------------------------

// X(name, return type, parameters)
#define LLM_COMM_UCP_FUNCTIONS(X)                                                                        \
  X(get_version, void, (unsigned* major, unsigned* minor, unsigned* release))                            \
  X(config_read, Status, (const char* prefix, const char* file, Options**))                              \
  X(config_modify, Status, (Options*, const char* name, const char* value))                              \
  X(config_release, void, (Options*))                                                                    \
  X(init_version, Status, (unsigned major, unsigned minor, const Params*, const Options*, Context*))     \
  X(cleanup, void, (Context))                                                                            \
  X(worker_create, Status, (Context, const WorkerParams*, Worker*))                                      \
  X(worker_destroy, void, (Worker))                                                                      \
  X(worker_query, Status, (Worker, WorkerAttr*))                                                         \
  X(worker_release_address, void, (Worker, WorkerAddress*))                                              \
  X(worker_progress, unsigned, (Worker))                                                                 \
  X(worker_fence, Status, (Worker))                                                                      \
  X(mem_map, Status, (Context, const MapParams*, Memory*))                                               \
  X(mem_unmap, Status, (Context, Memory))                                                                \
  X(rkey_pack, Status, (Context, Memory, void** buffer, size_t* bytes))                                  \
  X(rkey_buffer_release, void, (void* buffer))                                                           \
  X(ep_create, Status, (Worker, const EndpointParams*, Endpoint*))                                       \
  X(ep_close_nbx, StatusPointer, (Endpoint, const RequestParam*))                                        \
  X(ep_flush_nbx, StatusPointer, (Endpoint, const RequestParam*))                                        \
  X(ep_rkey_unpack, Status, (Endpoint, const void* buffer, RemoteKey*))                                  \
  X(rkey_destroy, void, (RemoteKey))                                                                     \
  X(put_nbx, StatusPointer,                                                                              \
    (Endpoint, const void* from, size_t bytes, uint64_t remote_address, RemoteKey, const RequestParam*)) \
  X(request_check_status, Status, (void* request))                                                       \
  X(request_free, void, (void* request))

struct Functions {
#define LLM_COMM_UCP_POINTER(name, returned, taken) returned(*name) taken;
  LLM_COMM_UCP_FUNCTIONS(LLM_COMM_UCP_POINTER)
#undef LLM_COMM_UCP_POINTER
  const char* (*status_string)(Status);
};

// Functions of the process's libucp. Throws std::runtime_error if the library is missing or too old.
const Functions& functions();

// Version of the library, for example "1.22.0". Throws as functions() does.
std::string version();

}  // namespace llm_comm::host::ucp
