/* A stand-in for libcuda: one GPU or two, and a memory limit if the variable of MPS is set and CANARY does not break it. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int breaks(const char *what)
{
    const char *broken = getenv("CANARY");
    return broken != NULL && strcmp(broken, what) == 0;
}

int cuGetErrorName(int code, const char **text)
{
    *text = code == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_UNKNOWN";
    return 0;
}

int cuInit(unsigned flags) { return flags != 0 || breaks("no-gpu") ? 100 : 0; }

int cuDeviceGetCount(int *count)
{
    *count = breaks("two-gpus") ? 2 : 1;
    return 0;
}

int cuDeviceGet(int *device, int index)
{
    *device = index;
    return 0;
}

int cuDeviceGetUuid(unsigned char *uuid, int device)
{
    memset(uuid, 0x11 * (device + 1), 16);
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    if (attribute != 133 || device != 0 || breaks("old-driver")) /* CU_DEVICE_ATTRIBUTE_MPS_ENABLED */
        return 1;
    *value = getenv("CUDA_MPS_PIPE_DIRECTORY") != NULL && !breaks("outside");
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = (void *)0x1234567890; /* more than 32 bits */
    return device;
}

int cuCtxSetCurrent(void *context) { return context == (void *)0x1234567890 ? 0 : 201; }

int cuMemAlloc_v2(uint64_t *pointer, size_t bytes)
{
    const char *text = getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
    unsigned long mib = 0;
    if (breaks("takes-more") && bytes > 1 << 20)
        abort();
    if (text != NULL && !breaks("no-limit") && sscanf(text, "0=%luM", &mib) == 1 && bytes > mib << 20)
        return 2;
    *pointer = 1;
    return 0;
}
