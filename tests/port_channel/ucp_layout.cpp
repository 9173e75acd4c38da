// Compares what host/ucx/ucp_api.h says of UCX with UCX's own headers. It is enough that this compiles.
#include <ucp/api/ucp.h>

#include "host/ucx/ucp_api.h"

namespace ours = llm_comm::host::ucp;

#define SAME_SIZE(of_ours, theirs) static_assert(sizeof(ours::of_ours) == sizeof(theirs), #theirs)
#define SAME_PLACE(of_ours, field, theirs, of_theirs) \
  static_assert(offsetof(ours::of_ours, field) == offsetof(theirs, of_theirs), #theirs "::" #of_theirs)
#define SAME_VALUE(of_ours, theirs) static_assert(ours::of_ours == static_cast<uint64_t>(theirs), #theirs)

SAME_PLACE(Params, features, ucp_params_t, features);
SAME_PLACE(Params, name, ucp_params_t, name);
SAME_VALUE(kFeatureRma, UCP_FEATURE_RMA);
SAME_VALUE(kParamsHaveFeatures, UCP_PARAM_FIELD_FEATURES);

SAME_PLACE(WorkerParams, thread_mode, ucp_worker_params_t, thread_mode);
SAME_PLACE(WorkerParams, events, ucp_worker_params_t, events);
SAME_PLACE(WorkerParams, client_id, ucp_worker_params_t, client_id);
SAME_VALUE(kThreadsInTurn, UCS_THREAD_MODE_SERIALIZED);
SAME_VALUE(kWorkerParamsHaveThreadMode, UCP_WORKER_PARAM_FIELD_THREAD_MODE);

SAME_PLACE(WorkerAttr, address, ucp_worker_attr_t, address);
SAME_PLACE(WorkerAttr, address_length, ucp_worker_attr_t, address_length);
SAME_PLACE(WorkerAttr, max_debug_string, ucp_worker_attr_t, max_debug_string);
SAME_VALUE(kWorkerAttrHasAddress, UCP_WORKER_ATTR_FIELD_ADDRESS);

SAME_SIZE(MapParams, ucp_mem_map_params_t);
SAME_PLACE(MapParams, address, ucp_mem_map_params_t, address);
SAME_PLACE(MapParams, length, ucp_mem_map_params_t, length);
SAME_PLACE(MapParams, memory_type, ucp_mem_map_params_t, memory_type);
SAME_VALUE(kMapHasAddress, UCP_MEM_MAP_PARAM_FIELD_ADDRESS);
SAME_VALUE(kMapHasLength, UCP_MEM_MAP_PARAM_FIELD_LENGTH);
SAME_VALUE(kMapHasMemoryType, UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE);
SAME_VALUE(kHostMemory, UCS_MEMORY_TYPE_HOST);

SAME_SIZE(EndpointParams, ucp_ep_params_t);
SAME_PLACE(EndpointParams, address, ucp_ep_params_t, address);
SAME_PLACE(EndpointParams, error_mode, ucp_ep_params_t, err_mode);
SAME_PLACE(EndpointParams, error_handler, ucp_ep_params_t, err_handler);
SAME_PLACE(EndpointParams, local_socket_address, ucp_ep_params_t, local_sockaddr);
SAME_VALUE(kEndpointHasAddress, UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
SAME_VALUE(kEndpointHasErrorMode, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
SAME_VALUE(kEndpointHasErrorHandler, UCP_EP_PARAM_FIELD_ERR_HANDLER);
SAME_VALUE(kErrorsOfPeers, UCP_ERR_HANDLING_MODE_PEER);

SAME_PLACE(RequestParam, flags, ucp_request_param_t, flags);
SAME_PLACE(RequestParam, callback, ucp_request_param_t, cb);
SAME_PLACE(RequestParam, user_data, ucp_request_param_t, user_data);
SAME_PLACE(RequestParam, memory, ucp_request_param_t, memh);
SAME_VALUE(kRequestHasCallback, UCP_OP_ATTR_FIELD_CALLBACK);
SAME_VALUE(kRequestHasUserData, UCP_OP_ATTR_FIELD_USER_DATA);
SAME_VALUE(kRequestHasFlags, UCP_OP_ATTR_FIELD_FLAGS);
SAME_VALUE(kRequestHasMemory, UCP_OP_ATTR_FIELD_MEMH);
SAME_VALUE(kCloseByForce, UCP_EP_CLOSE_FLAG_FORCE);

static_assert(sizeof(ours::Status) == sizeof(ucs_status_t));
static_assert(ours::kOk == UCS_OK && ours::kInProgress == UCS_INPROGRESS && ours::kLastError == UCS_ERR_LAST);
