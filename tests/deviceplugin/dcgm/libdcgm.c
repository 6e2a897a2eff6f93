/* Stands in for libdcgm: two GPUs, one of them with a MIG instance. It refuses what a real one would refuse: structures
   of another size, calls without a connection, fields that nobody watches. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned version, persist, timeoutMs, isUnix; } Connect;
typedef struct { unsigned group; unsigned id; } Pair;
typedef struct {
    unsigned version, group, id; unsigned short field, type; int status; unsigned unused; int64_t ts;
    union { int64_t i64; double dbl; char str[256]; char blob[4096]; } value;
} Value;
typedef struct { Pair entity, parent; int profile; } OldPart;
typedef struct { char uuid[128]; unsigned gpu, instance, compute, profile, slices; } Info;
typedef struct { Pair entity, parent; Info info; } Part;
typedef struct { unsigned version, count; Part parts[32 * 14]; } Hierarchy;

static int connected, watched, gpus;

int dcgmInit(void) { return 0; }
const char *errorString(int code) { return code == -6 ? "Version mismatch" : code == -33 ? "The connection is not valid" : "Generic error"; }
int dcgmConnect_v2(const char *address, Connect *params, uintptr_t *handle) {
    if (params->version != (sizeof(Connect) | 2 << 24)) return -6;
    gpus = strcmp(address, "empty:5555") ? 2 : 0;
    if (gpus && strcmp(address, "localhost:5555") && !(params->isUnix && !strcmp(address, "/run/dcgm.sock"))) return -33;
    *handle = 7; connected = 1; watched = 0; return 0;
}
int dcgmDisconnect(uintptr_t handle) { connected = watched = 0; return handle == 7 ? 0 : -33; }
int dcgmGetAllSupportedDevices(uintptr_t handle, unsigned *ids, int *count) {
    if (handle != 7 || !connected) return -33;
    ids[0] = 0; ids[1] = 1; *count = gpus; return 0;
}
int dcgmGetGpuInstanceHierarchy(uintptr_t handle, Hierarchy *found) {
    if (handle != 7 || !connected) return -33;
    if (found->version != (sizeof(Hierarchy) | 2 << 24)) return -6;
    found->count = 2;
    memset(found->parts, 0, sizeof(Part) * 2);
    found->parts[0].entity.group = 4; found->parts[0].entity.id = 40;
    strcpy(found->parts[0].info.uuid, "GPU-1"); found->parts[0].info.instance = 3;
    found->parts[1].entity.group = 5;
    return 0;
}
int dcgmFieldGroupCreate(uintptr_t handle, int count, unsigned short *fields, const char *name, uintptr_t *group) {
    char own[32]; /* another process holds every other name: the real one refuses a name that it has */
    snprintf(own, sizeof own, "carpool-%d", getpid());
    if (handle != 7 || count < 10 || fields[0] != 100 || strcmp(name, own)) return -1;
    *group = 9; return 0;
}
int dcgmWatchFields(uintptr_t handle, uintptr_t who, uintptr_t group, long long every, double keep, int most) {
    if (handle != 7 || group != 9 || every != 1000000 || keep < 1.0 || most) return -1;
    watched += who == 0x7fffffff || who == 0x7ffffffd;
    return 0;
}
int dcgmEntitiesGetLatestValues(uintptr_t handle, Pair *who, unsigned whoCount, unsigned short *fields, unsigned fieldCount,
                                unsigned flags, Value *values) {
    if (handle != 7 || !connected) return -33;
    for (unsigned i = 0; i < whoCount; i++)
        for (unsigned j = 0; j < fieldCount; j++) {
            Value *v = values + i * fieldCount + j;
            if (v->version != (sizeof(Value) | 2 << 24)) return -6;
            v->group = who[i].group; v->id = who[i].id; v->field = fields[j];
            v->status = watched == 2 || flags == 1 ? 0 : -35;
            v->type = 'i'; v->value.i64 = 0x7ffffffffffffff0;
            if (fields[j] == 54) { v->type = 's'; strcpy(v->value.str, who[i].id ? "GPU-1" : "GPU-0"); }
            if (fields[j] == 1002) { v->type = 'd'; v->value.dbl = who[i].group == 4 ? 0.75 : 0.5; }
            if (fields[j] == 1001) { v->type = 'd'; v->value.dbl = 0.0 / 0.0; }
            if (fields[j] == 1005) { v->type = 'd'; v->value.dbl = 140737488355328.0; }
            if (fields[j] == 150) v->value.i64 = 41;
        }
    return 0;
}
