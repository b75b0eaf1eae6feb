/* NVML entry points that say what there is: system, devices, names. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "call.h"

const char *nvmlErrorString(nvmlReturn_t result)
{
    static const struct {
        int code;
        const char *text;
    } texts[] = {
        {NVML_SUCCESS, "Success"},
        {NVML_ERROR_UNINITIALIZED, "Uninitialized"},
        {NVML_ERROR_INVALID_ARGUMENT, "Invalid Argument"},
        {NVML_ERROR_NOT_SUPPORTED, "Not Supported"},
        {NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"},
        {NVML_ERROR_NOT_FOUND, "Not Found"},
        {NVML_ERROR_INSUFFICIENT_SIZE, "Insufficient Size"},
        {NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"},
        {NVML_ERROR_TIMEOUT, "Timeout"},
        {NVML_ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found"},
        {NVML_ERROR_FUNCTION_NOT_FOUND, "Function Not Found"},
        {NVML_ERROR_GPU_IS_LOST, "GPU is lost"},
        {NVML_ERROR_RESET_REQUIRED, "GPU requires reset"},
        {NVML_ERROR_LIB_RM_VERSION_MISMATCH, "Driver/library version mismatch"},
        {NVML_ERROR_IN_USE, "In use by another client"},
        {NVML_ERROR_INSUFFICIENT_RESOURCES, "Insufficient Resources"},
    };

    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        if (texts[i].code == (int)result)
            return texts[i].text;
    return "Unknown Error";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    struct call call;
    nvmlReturn_t code = call_begin_system(&call, __func__);

    return code != NVML_SUCCESS ? code : call_end(&call, copy_text(version, length, call.node->state->driver));
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    char text[NAME_LEN + 4];

    if (current_node() == NULL)
        return NVML_ERROR_UNINITIALIZED;
    snprintf(text, sizeof text, "13.%s", current_node()->state->driver);
    return copy_text(version, length, text);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    if (version == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *version = 13000;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    return nvmlSystemGetCudaDriverVersion(version);
}

static unsigned visible_before(const struct state *state, const struct gpu *gpu)
{
    unsigned count = 0;

    for (const struct gpu *other = state->gpu; other < gpu; other++)
        count += !other->hidden;
    return count;
}

static unsigned visible_gpus(const struct state *state)
{
    return visible_before(state, state->gpu + state->n_gpus);
}

/* NVML index: the rank by PCI address (the order of the slots) among the devices that are there, turned by what a
 * test asked for. */
static unsigned index_of(const struct state *state, const struct gpu *gpu)
{
    unsigned count = visible_gpus(state);

    return count == 0 ? 0 : (visible_before(state, gpu) + session_rotation()) % count;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    struct call call;
    nvmlReturn_t code = count == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin_system(&call, __func__);

    if (code != NVML_SUCCESS)
        return code;
    *count = (unsigned int)whole(call_value(&call, 0, visible_gpus(call.node->state)));
    return call_end(&call, NVML_SUCCESS);
}

/* Hand out the handle of a device that was found; the device's own faults are met here. */
static nvmlReturn_t hand_out(const char *function, nvmlDevice_t found, nvmlDevice_t *device)
{
    struct call call;
    nvmlReturn_t code = call_begin_any(&call, function, found);

    if (code != NVML_SUCCESS)
        return code;
    *device = found;
    return call_end(&call, NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    struct node *node = current_node();

    if (node == NULL)
        return NVML_ERROR_UNINITIALIZED;
    if (device == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < node->state->n_gpus; i++) {
        struct gpu *gpu = &node->state->gpu[i];
        if (!gpu->hidden && index_of(node->state, gpu) == index)
            return hand_out(__func__, handle_of(node, gpu, BOARD), device);
    }
    return NVML_ERROR_INVALID_ARGUMENT;
}

/* A slice has the UUID of its device with another first word and other first digits. */
static void uuid_of(const struct gpu *gpu, int slice, char text[UUID_LEN])
{
    memcpy(text, gpu->uuid, UUID_LEN);
    if (slice != BOARD && strlen(text) > 6) {
        memcpy(text, "MIG-", 4);
        text[4] = (char)('1' + slice);
        text[5] = '0';
    }
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    struct node *node = current_node();

    if (node == NULL)
        return NVML_ERROR_UNINITIALIZED;
    if (uuid == NULL || device == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < node->state->n_gpus; i++) {
        struct gpu *gpu = &node->state->gpu[i];
        for (int slice = BOARD; !gpu->hidden && slice < gpu->mig; slice++) {
            char text[UUID_LEN];
            uuid_of(gpu, slice, text);
            if (strcmp(text, uuid) == 0)
                return hand_out(__func__, handle_of(node, gpu, slice), device);
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *address, nvmlDevice_t *device)
{
    struct node *node = current_node();

    if (node == NULL)
        return NVML_ERROR_UNINITIALIZED;
    if (address == NULL || device == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < node->state->n_gpus; i++) {
        struct gpu *gpu = &node->state->gpu[i];
        /* The domain is written with eight digits, or with four as lspci does. */
        if (!gpu->hidden && (strcasecmp(gpu->pci, address) == 0 || strcasecmp(gpu->pci + 4, address) == 0))
            return hand_out(__func__, handle_of(node, gpu, BOARD), device);
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    struct call call;
    char text[NAME_LEN + 16];
    nvmlReturn_t code = call_begin_any(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    snprintf(text, sizeof text, "%s%s", call.node->state->model, call.slice == BOARD ? "" : " MIG 1g.18gb");
    return call_end(&call, copy_text(name, length, text));
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    struct call call;
    char text[UUID_LEN];
    nvmlReturn_t code = call_begin_any(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    uuid_of(call.gpu, call.slice, text);
    return call_end(&call, copy_text(uuid, length, text));
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    struct call call;
    nvmlReturn_t code = pci == NULL ? NVML_ERROR_INVALID_ARGUMENT : call_begin(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    memset(pci, 0, sizeof *pci);
    snprintf(pci->busId, sizeof pci->busId, "%s", call.gpu->pci);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%.15s", call.gpu->pci + 4);
    sscanf(call.gpu->pci, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    pci->pciDeviceId = 0x233510de; /* H200 SXM */
    return call_end(&call, NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    struct call call;
    nvmlReturn_t code = call_begin(&call, __func__, device);

    if (code != NVML_SUCCESS)
        return code;
    if (major == NULL || minor == NULL)
        return call_end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *major = 9;
    *minor = 0;
    return call_end(&call, NVML_SUCCESS);
}

GETTER_ANY(nvmlDeviceGetIndex, unsigned int,
           call.slice == BOARD ? index_of(call.node->state, call.gpu) : (unsigned)call.slice)
GETTER(nvmlDeviceGetMinorNumber, unsigned int, call.gpu->minor)
GETTER(nvmlDeviceGetArchitecture, nvmlDeviceArchitecture_t, NVML_DEVICE_ARCH_HOPPER)
