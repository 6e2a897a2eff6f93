/* A library in NVML's place: two GPUs of Hopper's kind, as far as the agent's calls go; with -DWITH_MIG they have MIG. What
 * it takes and returns is laid out as NVIDIA's reference describes it; a structure of another size or version is refused,
 * as the real library does. Functions that are not here are absent, as in a driver older than the bindings. With the
 * variable STAND_IN_REFUSES it does not start, and says that number; with STAND_IN_IDLE no process is on its GPUs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned int uint;
typedef unsigned long long ull;
typedef int result; /* 0 success, 1 uninitialized, 2 invalid argument, 3 not supported, 6 not found, 7 insufficient size,
                       10 timeout, 19 in use, 23 insufficient resources, 25 argument version mismatch */

typedef struct { int index; ull energy_mj; } gpu;
typedef struct { ull total, free, used; } memory_v1;
typedef struct { uint version; ull total, reserved, free, used; } memory_v2;
typedef struct { char legacy[16]; uint domain, bus, device, id, subsystem; char bus_id[32]; } pci;
typedef struct { uint gpu, memory; } utilization;
typedef struct { uint pid; ull memory; uint gpu_instance, compute_instance; } process;
typedef struct { uint pid; ull stamp; uint sm, mem, enc, dec; } sample;
typedef struct { gpu *device; ull type, data; uint gpu_instance, compute_instance; } event;
typedef struct { uint version, supported; } gpm_support;
typedef struct { uint id; result code; double value; struct { char *abbreviation, *name, *unit; } info; } metric;
typedef struct { uint version, count; void *before, *now; metric metrics[1]; } gpm_request;

#define MIB (1024ull * 1024)
#define VERSIONED(type, number) (sizeof(type) | (number) << 24)
static gpu gpus[2] = {{0, 0}, {1, 0}};
static int users, registered;

#define OPEN if (users <= 0) return 1
#define KNOWN OPEN; if (device != &gpus[0] && device != &gpus[1]) return 2

#ifdef WITH_MIG
#include "mig.h"
#define PRODUCT "NVIDIA H100 80GB HBM3"
#define IS_DIVIDED (device == &gpus[0])
#else
#define PRODUCT "NVIDIA H100 PCIe"
#define IS_DIVIDED 0
result nvmlDeviceGetMigMode(gpu *device, uint *now, uint *pending) { KNOWN; (void)now, (void)pending; return 3; }
#endif

result nvmlInitWithFlags(uint flags) {
    const char *refuses = getenv("STAND_IN_REFUSES");
    (void)flags;
    if (refuses) return atoi(refuses);
    users++;
    return 0;
}

result nvmlShutdown(void) { OPEN; users--; return 0; }
const char *nvmlErrorString(result code) { (void)code; return "said by the library in NVML's place"; }
result nvmlSystemGetDriverVersion(char *text, uint size) { OPEN; strncpy(text, "580.95.05", size); return 0; }
result nvmlSystemGetCudaDriverVersion(int *version) { OPEN; *version = 13000; return 0; }
result nvmlDeviceGetCount_v2(uint *count) { OPEN; *count = 2; return 0; }

result nvmlDeviceGetHandleByIndex_v2(uint index, gpu **device) {
    OPEN;
    if (index > 1) return 2;
    *device = &gpus[index];
    return 0;
}

static const char *uuids[2] = {"GPU-00000000-0000-4000-8000-00000000000a", "GPU-00000000-0000-4000-8000-00000000000b"};

result nvmlDeviceGetUUID(gpu *device, char *text, uint size) {
#ifdef WITH_MIG
    if (part_of(device)) { name_part(part_of(device), text, size); return 0; }
#endif
    KNOWN;
    strncpy(text, uuids[device->index], size);
    return 0;
}

result nvmlDeviceGetHandleByUUID(const char *uuid, gpu **device) {
    OPEN;
    for (int at = 0; at < 2; at++)
        if (!strcmp(uuid, uuids[at])) { *device = &gpus[at]; return 0; }
#ifdef WITH_MIG
    for (int at = 0; at < MOST; at++) {
        char name[64];
        name_part(&instances[at], name, sizeof name);
        if (instances[at].has_compute && !strcmp(uuid, name)) { *device = &instances[at].device; return 0; }
    }
#endif
    return 6;
}

result nvmlDeviceGetIndex(gpu *device, uint *index) { KNOWN; *index = device->index; return 0; }
result nvmlDeviceGetMinorNumber(gpu *device, uint *minor) { KNOWN; *minor = 4 + device->index; return 0; }
result nvmlDeviceGetName(gpu *device, char *text, uint size) { KNOWN; strncpy(text, PRODUCT, size); return 0; }

result nvmlDeviceGetMemoryInfo(gpu *device, memory_v1 *memory) {
#ifdef WITH_MIG
    if (part_of(device)) {
        ull total = part_of(device)->of->mb * MIB;
        *memory = (memory_v1){total, total - 50 * MIB, 50 * MIB};
        return 0;
    }
#endif
    KNOWN;
    *memory = (memory_v1){81559 * MIB, 79000 * MIB, 2559 * MIB};
    return 0;
}

result nvmlDeviceGetMemoryInfo_v2(gpu *device, memory_v2 *memory) {
    KNOWN;
    if (memory->version != VERSIONED(memory_v2, 2)) return 25;
    *memory = (memory_v2){memory->version, 81559 * MIB, 559 * MIB, 79000 * MIB, 2000 * MIB};
    return 0;
}

result nvmlDeviceGetCudaComputeCapability(gpu *device, int *major, int *minor) { KNOWN; *major = 9, *minor = 0; return 0; }
result nvmlDeviceGetEnforcedPowerLimit(gpu *device, uint *mw) { KNOWN; *mw = 350000; return 0; }
result nvmlDeviceGetPowerUsage(gpu *device, uint *mw) { KNOWN; *mw = 120500; return 0; }
result nvmlDeviceGetTotalEnergyConsumption(gpu *device, ull *mj) { KNOWN; *mj = device->energy_mj += 7; return 0; }
result nvmlDeviceGetTemperature(gpu *device, uint sensor, uint *celsius) { KNOWN; if (sensor) return 2; *celsius = 41; return 0; }
result nvmlDeviceGetClockInfo(gpu *device, uint type, uint *mhz) { KNOWN; *mhz = type == 1 ? 1755 : 1593; return 0; }
result nvmlDeviceGetCurrentClocksEventReasons(gpu *device, ull *reasons) { KNOWN; *reasons = 1; return 0; }
result nvmlDeviceGetUtilizationRates(gpu *device, utilization *rates) { KNOWN; if (IS_DIVIDED) return 3; *rates = (utilization){60, 25}; return 0; }
result nvmlDeviceGetNvLinkState(gpu *device, uint link, uint *active) { KNOWN; (void)link, (void)active; return 3; }

result nvmlDeviceGetTotalEccErrors(gpu *device, uint error, uint counter, ull *count) {
    KNOWN;
    *count = error == 1 && counter == 0 ? 0 : 99;
    return 0;
}

result nvmlDeviceGetRemappedRows(gpu *device, uint *correctable, uint *uncorrectable, uint *pending, uint *failure) {
    KNOWN;
    *correctable = 1, *uncorrectable = *pending = *failure = 0;
    return 0;
}

result nvmlDeviceGetPciInfo_v3(gpu *device, pci *found) {
    KNOWN;
    *found = (pci){"0000:17:00.0", 0, 0x17, 0, 0x233110de, 0, "00000000:17:00.0"};
    found->bus_id[10] = "78"[device->index];
    return 0;
}

result nvmlDeviceGetComputeRunningProcesses_v3(gpu *device, uint *count, process *processes) {
    KNOWN;
    uint room = *count, there = device->index == 0 && !IS_DIVIDED && getenv("STAND_IN_IDLE") == NULL ? 2 : 0;
    *count = there;
    if (room < there) return 7;
    for (uint at = 0; at < there; at++) processes[at] = (process){4000000 + at, 1000 * MIB, 0xFFFFFFFF, 0xFFFFFFFF};
    return 0;
}

/* Its ring has slots that were never filled. */
result nvmlDeviceGetProcessUtilization(gpu *device, sample *samples, uint *count, ull since) {
    KNOWN;
    if (IS_DIVIDED) return 3;
    if (device->index == 1) return 6;
    if (samples == NULL) { *count = 4; return 7; }
    *count = 4;
    if (since == 0) since = 1000000 * (ull)(time(NULL) - 1);
    samples[0] = (sample){4000000, since + 1000, 50, 10, 0, 0};
    samples[1] = (sample){4000001, since + 2000, 25, 10, 0, 0};
    samples[2] = samples[3] = (sample){0, 0, 0xFFFF, 0xFFFF, 0, 0};
    return 0;
}

result nvmlEventSetCreate(void **set) { OPEN; *set = malloc(1); return 0; }
result nvmlEventSetFree(void *set) { OPEN; free(set); return 0; }

result nvmlDeviceRegisterEvents(gpu *device, ull types, void *set) {
    KNOWN;
    if (set == NULL || types != 8) return 2;
    registered |= 1 << device->index;
    return 0;
}

/* One error of each GPU that was registered, once. */
result nvmlEventSetWait_v2(void *set, event *found, uint timeout_ms) {
    OPEN;
    (void)set, (void)timeout_ms;
    for (int at = 0; at < 2; at++)
        if (registered & 1 << at) {
            registered &= ~(1 << at);
            *found = (event){&gpus[at], 8, 31 + at, at ? 0 : 0xFFFFFFFF, 0xFFFFFFFF};
            return 0;
        }
    return 10;
}

result nvmlGpmQueryDeviceSupport(gpu *device, gpm_support *support) {
    KNOWN;
    if (support->version != 1) return 25;
    support->supported = 1;
    return 0;
}

result nvmlGpmSampleAlloc(void **made) { OPEN; *made = calloc(1, 8); return 0; }
result nvmlGpmSampleFree(void *made) { OPEN; free(made); return 0; }
result nvmlGpmSampleGet(gpu *device, void *into) { KNOWN; if (into == NULL) return 2; *(gpu **)into = device; return 0; }

/* Percentages, but for what it does not know. */
result nvmlGpmMetricsGet(gpm_request *request) {
    OPEN;
    if (request->version != 1) return 25;
    if (*(gpu **)request->before != *(gpu **)request->now) return 2;
    for (uint at = 0; at < request->count; at++) {
        metric *asked = &request->metrics[at];
        asked->code = asked->id == 2 || asked->id == 10 ? 0 : 3; /* SM activity, DRAM bandwidth */
        asked->value = asked->id == 2 ? 37.5 : 12.5;
    }
    return 0;
}
