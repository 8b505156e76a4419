// Axes: round ticks, linear or logarithmic.

/** Round values that cover [0, top], about `wanted` of them. */
export function linearTicks(top, wanted = 5) {
  const raw = top / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= raw * 0.999) * power;
  return Array.from({ length: Math.floor(top / step + 1e-9) + 1 }, (_, i) => i * step);
}

/** Round values within [low, high], about `wanted` of them. */
export function ticksBetween(low, high, wanted = 5) {
  const raw = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((m) => m * power >= raw * 0.999) * power;
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-12); k++) out.push(k * step);
  return out;
}

/** Powers of ten within [low, high]; with 2 and 5 where those are few. */
export function logTicks(low, high) {
  const ticks = [];
  const decades = Math.log10(high / low);
  const factors = decades <= 1.5 ? [1, 2, 3, 5] : decades <= 3 ? [1, 3] : [1];
  const every = Math.max(1, Math.ceil(decades / 7));
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) {
    if (p % every) continue;
    for (const f of factors) {
      const value = f * 10 ** p;
      if (value >= low * 0.999 && value <= high * 1.001) ticks.push(value);
    }
  }
  return ticks;
}

/**
 * A scale from values to pixels: logarithmic where they span more than 12 times, else linear;
 * from zero, unless `loose` and nothing is near it. Gives {at(value), ticks, log}.
 */
export function scaleOf(values, from, to, { loose = false } = {}) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  if (low > 0 && high / low > 12) {
    const [a, b] = [Math.log(low / 1.25), Math.log(high * 1.25)];
    return {
      log: true,
      ticks: logTicks(Math.exp(a), Math.exp(b)),
      at: (v) => from + ((Math.log(v) - a) / (b - a)) * (to - from),
    };
  }
  const near = loose && low > high / 2;
  const room = near ? Math.max((high - low) * 0.15, high * 0.01) : high * 0.1;
  const bottom = near ? low - room : 0;
  const top = high + room || 1;
  const ticks = near ? ticksBetween(bottom, top) : linearTicks(top);
  return { log: false, ticks, at: (v) => from + ((v - bottom) / (top - bottom)) * (to - from) };
}
