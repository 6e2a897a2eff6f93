/* MIG of the first GPU in NVML's place, which is switched on; the second one's is off. Built in with -DWITH_MIG. */

typedef struct { uint version, id, p2p, slices, count, sm, copy, decoders, encoders, jpeg, ofa; ull mb; char name[96]; } gi_profile;
typedef struct { uint version, id, slices, count, sm, copy, decoders, encoders, jpeg, ofa; char name[96]; } ci_profile;
typedef struct { uint start, size; } placement;
typedef struct { gpu *device; uint id, profile; placement place; } gi_info;
typedef struct { const char *name; uint index, id, slices, sm, mb, size, starts[7], places; } kind;
typedef struct { gpu device; int is_there, has_compute; uint id; const kind *of; placement place; } instance;

static const kind kinds[] = {
    {"MIG 1g.10gb", 0, 19, 1, 16, 9984, 1, {0, 1, 2, 3, 4, 5, 6}, 7},
    {"MIG 2g.20gb", 1, 14, 2, 32, 20096, 2, {0, 2, 4}, 3},
    {"MIG 3g.40gb", 2, 9, 3, 60, 40448, 4, {0, 4}, 2},
    {"MIG 4g.40gb", 3, 5, 4, 64, 40448, 4, {0}, 1},
    {"MIG 7g.80gb", 4, 0, 7, 132, 81152, 8, {0}, 1},
    {"MIG 1g.10gb+me", 7, 20, 1, 16, 9984, 1, {0, 1, 2, 3, 4, 5, 6}, 7},
    {"MIG 1g.20gb", 9, 15, 1, 16, 20096, 2, {0, 2, 4, 6}, 4},
};
#define KINDS (sizeof kinds / sizeof *kinds)
#define MOST 7
static const uint slices_of[] = {1, 2, 3, 4, 7}; /* of compute instance profiles, by their index and ID */
static instance instances[MOST];

#define DIVIDED KNOWN; if (device != &gpus[0]) return 3
#define THERE OPEN; if (made < instances || made >= instances + MOST || !made->is_there) return 2

static instance *part_of(gpu *device) {
    for (int at = 0; at < MOST; at++)
        if (device == &instances[at].device && instances[at].has_compute) return &instances[at];
    return NULL;
}

static void name_part(const instance *made, char *text, uint size) {
    snprintf(text, size, "MIG-00000000-0000-4000-8000-%012x", 1 + (uint)(made - instances));
}

static const kind *kind_of(uint id) {
    for (uint at = 0; at < KINDS; at++)
        if (kinds[at].id == id) return &kinds[at];
    return NULL;
}

result nvmlDeviceGetMigMode(gpu *device, uint *now, uint *pending) { KNOWN; *now = *pending = device == &gpus[0]; return 0; }
result nvmlDeviceGetMaxMigDeviceCount(gpu *device, uint *count) { KNOWN; *count = device == &gpus[0] ? MOST : 0; return 0; }

result nvmlDeviceGetMigDeviceHandleByIndex(gpu *device, uint index, gpu **found) {
    DIVIDED;
    if (index >= MOST) return 2;
    if (!part_of(&instances[index].device)) return 6;
    *found = &instances[index].device;
    return 0;
}

result nvmlDeviceGetGpuInstanceId(gpu *device, uint *id) {
    OPEN;
    if (!part_of(device)) return 2;
    *id = part_of(device)->id;
    return 0;
}

result nvmlDeviceGetComputeInstanceId(gpu *device, uint *id) { OPEN; if (!part_of(device)) return 2; *id = 0; return 0; }

result nvmlDeviceGetGpuInstanceProfileInfoV(gpu *device, uint index, gi_profile *info) {
    KNOWN;
    if (info->version != VERSIONED(gi_profile, 2)) return 25;
    if (index >= 0x12) return 2;
    for (uint at = 0; at < KINDS; at++)
        if (kinds[at].index == index) {
            const kind *of = &kinds[at];
            *info = (gi_profile){info->version, of->id, 0, of->slices, of->places, of->sm, 1, 1, 0, 1, 0, of->mb, ""};
            strncpy(info->name, of->name, sizeof info->name - 1);
            return 0;
        }
    return 3;
}

result nvmlDeviceGetGpuInstancePossiblePlacements_v2(gpu *device, uint id, placement *places, uint *count) {
    KNOWN;
    const kind *of = kind_of(id);
    if (!of) return 2;
    if (*count < of->places) return 7;
    for (uint at = 0; at < of->places; at++) places[at] = (placement){of->starts[at], of->size};
    *count = of->places;
    return 0;
}

result nvmlDeviceGetGpuInstances(gpu *device, uint id, instance **found, uint *count) {
    DIVIDED;
    if (!kind_of(id)) return 2;
    *count = 0;
    for (int at = 0; at < MOST; at++)
        if (instances[at].is_there && instances[at].of->id == id) found[(*count)++] = &instances[at];
    return 0;
}

result nvmlGpuInstanceGetInfo(instance *made, gi_info *info) {
    THERE;
    *info = (gi_info){&gpus[0], made->id, made->of->id, made->place};
    return 0;
}

result nvmlDeviceCreateGpuInstanceWithPlacement(gpu *device, uint id, const placement *place, instance **made) {
    DIVIDED;
    const kind *of = kind_of(id);
    int is_possible = 0, room = -1;
    for (uint at = 0; of && at < of->places; at++) is_possible |= of->starts[at] == place->start && of->size == place->size;
    if (!is_possible) return 2;
    for (int at = 0; at < MOST; at++) {
        const instance *other = &instances[at];
        if (!other->is_there) room = at;
        else if (place->start < other->place.start + other->place.size && other->place.start < place->start + place->size)
            return 23;
    }
    if (room < 0) return 23;
    *made = &instances[room];
    **made = (instance){{-1, 0}, 1, 0, 1 + (uint)room, of, *place};
    return 0;
}

result nvmlGpuInstanceDestroy(instance *made) { THERE; if (made->has_compute) return 19; made->is_there = 0; return 0; }

result nvmlGpuInstanceGetComputeInstanceProfileInfoV(instance *made, uint index, uint engine, ci_profile *info) {
    THERE;
    if (info->version != VERSIONED(ci_profile, 2)) return 25;
    if (engine || index >= 9) return 2;
    if (index > 4 || slices_of[index] > made->of->slices) return 3;
    *info = (ci_profile){info->version, index, slices_of[index], 1, 1, 1, 1, 0, 0, 0, ""};
    return 0;
}

result nvmlGpuInstanceCreateComputeInstance(instance *made, uint id, instance **compute) {
    THERE;
    if (id > 4 || slices_of[id] != made->of->slices) return 2; /* all of it, or none */
    if (made->has_compute) return 23;
    made->has_compute = 1;
    *compute = made;
    return 0;
}

result nvmlGpuInstanceGetComputeInstances(instance *made, uint id, instance **found, uint *count) {
    THERE;
    *count = made->has_compute && id <= 4 && slices_of[id] == made->of->slices;
    if (*count) *found = made;
    return 0;
}

result nvmlComputeInstanceDestroy(instance *made) { THERE; if (!made->has_compute) return 2; made->has_compute = 0; return 0; }

/* What it wrote is what nvmlGpmMetricsGet compares. */
result nvmlGpmMigSampleGet(gpu *device, uint id, void *into) {
    DIVIDED;
    for (int at = 0; at < MOST; at++)
        if (instances[at].is_there && instances[at].id == id) { *(gpu **)into = &instances[at].device; return 0; }
    return 2;
}
