// What follows from a plan's document by arithmetic.

/** Categories of memory, named and ordered as in autoshard/figures: [field, class, name]. */
export const MEMORY = [
  ["parameters_bytes", "parameters", "Parameters"],
  ["gradients_bytes", "gradients", "Gradients"],
  ["optimizer_bytes", "optimizer-state", "Optimizer state"],
  ["activations_bytes", "activations", "Activations"],
  ["kv_cache_bytes", "kv-cache", "KV cache"],
  ["gathered_bytes", "gathered", "Gathered parameters"],
  ["temporary_bytes", "temporary", "Temporaries"],
  ["reserve_bytes", "reserve", "Reserve"],
];

export const memoryTotal = (memory) => MEMORY.reduce((sum, [field]) => sum + (memory[field] ?? 0), 0);

export const deviceCount = (mesh) => mesh.sizes.reduce((a, b) => a * b, 1);

/** `data=4, model=2`; axes of size 1 left out. */
export function meshText(mesh) {
  const parts = mesh.axis_names.map((n, i) => [n, mesh.sizes[i]]).filter(([, size]) => size > 1);
  return parts.length ? parts.map(([n, size]) => `${n}=${size}`).join(", ") : "one device";
}

/**
 * Links of a cluster, inner ones first: name, link, figures, and where the bandwidth's source
 * stands. Clusters of version 1, in plans that are kept, have two.
 */
export function tiersOf(cluster) {
  if (!cluster.tiers) {
    const { inside, across } = cluster;
    return [
      { ...inside, name: "node", link: inside.name, source: "inside.bytes_per_second" },
      { ...across, name: "fabric", link: across.name, source: "across.bytes_per_second" },
    ];
  }
  const size = ([, tier]) => tier.devices ?? Infinity; // JSON objects have no order
  return Object.entries(cluster.tiers)
    .sort((a, b) => (size(a) < size(b) ? -1 : 1))
    .map(([name, tier]) => ({ ...tier, name, source: `tiers.${name}.bytes_per_second` }));
}

/**
 * The axes larger than 1, outermost first: name, size, stride (devices between neighbours on the
 * axis), nodes (how many a group of the axis touches) and index(device). Devices are in row-major
 * order, `devices_per_node` consecutive ones on each node.
 */
export function axesOf(plan) {
  const { axis_names: names, sizes } = plan.mesh;
  const perNode = plan.cluster.devices_per_node;
  const axes = [];
  let stride = 1;
  for (let i = names.length - 1; i >= 0; i--) {
    const [size, step] = [sizes[i], stride];
    const touched = new Set();
    for (let k = 0; k < size; k++) touched.add(Math.floor((k * step) / perNode));
    if (size > 1) {
      axes.unshift({
        name: names[i], size, stride: step, nodes: touched.size,
        index: (device) => Math.floor(device / step) % size,
      });
    }
    stride *= size;
  }
  return axes;
}

/** Devices that differ from this one in their index on the axis alone, itself included. */
export function groupOf(axis, device) {
  const first = device - axis.index(device) * axis.stride;
  return Array.from({ length: axis.size }, (_, k) => first + k * axis.stride);
}

/** Tokens of a step, or null where samples are not sequences. */
export function tokensOfStep(plan) {
  if (plan.seq_len) return plan.global_batch * plan.seq_len;
  const ids = plan.inputs.input_ids ?? plan.inputs.tokens;
  return ids && ids.shape.length === 2 ? ids.shape[0] * ids.shape[1] : null;
}

/** [rate, unit]: tokens where there are, else samples a second. */
export function throughput(plan) {
  const tokens = tokensOfStep(plan);
  const amount = tokens ?? plan.global_batch;
  return [amount / plan.step_time.total_s, tokens === null ? "samples/s" : "tokens/s"];
}

/** `P(("model", "data"), None)` */
export function specText(spec) {
  const one = (entry) => {
    if (entry === null) return "None";
    if (!Array.isArray(entry)) return `"${entry}"`;
    return `(${entry.map((a) => `"${a}"`).join(", ")}${entry.length === 1 ? "," : ""})`;
  };
  return `P(${spec.map(one).join(", ")})`;
}

/** Shape of the largest shard. */
export function localShape(tensor, mesh) {
  const size = new Map(mesh.axis_names.map((n, i) => [n, mesh.sizes[i]]));
  return tensor.shape.map((length, dim) => {
    const entry = tensor.partition_spec[dim] ?? null;
    const axes = entry === null ? [] : [entry].flat();
    return axes.reduce((left, axis) => Math.ceil(left / (size.get(axis) ?? 1)), length);
  });
}

/** Name of a dtype as the service's requests spell it. */
export const shortDtype = (dtype) =>
  ({ bfloat16: "bf16", float16: "fp16", float32: "fp32", float64: "fp64" })[dtype] ?? dtype;

/** The request that gives this plan again, as far as the plan says; null if its model has no name. */
export function requestOf(plan, models) {
  if (!models.some((m) => m.name === plan.model.source)) return null;
  const limit = plan.memory.limit_bytes;
  const workload = {
    global_batch: plan.global_batch,
    ...(plan.seq_len ? { seq_len: plan.seq_len } : {}),
    dtype: shortDtype(plan.dtype),
    optimizer: plan.optimizer,
  };
  const search = {
    ...(plan.strategy === "auto" ? {} : { strategy: plan.strategy }),
    ...(limit === null || limit === plan.cluster.device.memory_bytes
      ? {}
      : { memory_limit_bytes: limit }),
    ...(plan.seed ? { seed: plan.seed } : {}),
  };
  return {
    model: { preset: plan.model.source },
    cluster: { preset: plan.cluster.name, devices: plan.cluster.devices },
    workload,
    ...(Object.keys(search).length ? { search } : {}),
  };
}
