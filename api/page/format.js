// Numbers as text. SI units: 1 GB is 1e9 bytes, as in the cluster's data sheets.

function scaled(value, units) {
  const size = Math.abs(value);
  let [factor, unit] = units[0];
  for (const [f, u] of units) if (size >= f * 0.9995) [factor, unit] = [f, u];
  return [value / factor, unit];
}

/** Three significant digits, no exponent: 0.0123, 1.23, 12.3, 123, 1,234. */
export function digits(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  const places = Math.max(0, Math.min(6, 2 - Math.floor(Math.log10(size))));
  const text = value.toLocaleString("en", { maximumFractionDigits: places });
  return text;
}

const BYTES = [[1, "B"], [1e3, "kB"], [1e6, "MB"], [1e9, "GB"], [1e12, "TB"], [1e15, "PB"]];
const SECONDS = [[1e-9, "ns"], [1e-6, "µs"], [1e-3, "ms"], [1, "s"]];
const COUNTS = [[1, ""], [1e3, "k"], [1e6, "M"], [1e9, "B"], [1e12, "T"]];

/** 44 GB */
export function bytes(value) {
  if (value === 0) return "0";
  const [number, unit] = scaled(value, BYTES);
  return `${digits(number)} ${unit}`;
}

/** 255 ms; from two minutes on 2 min 5 s */
export function seconds(value) {
  if (value === 0) return "0";
  if (value >= 120) {
    const whole = Math.round(value);
    const [hours, minutes, rest] = [
      Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60,
    ];
    return hours ? `${hours} h ${minutes} min` : `${minutes} min ${rest} s`;
  }
  const [number, unit] = scaled(value, SECONDS);
  return `${digits(number)} ${unit}`;
}

/** As `seconds`, always in one unit, for axes: 1,000 s */
export function secondsTick(value) {
  const [number, unit] = value === 0 ? [0, ""] : scaled(value, SECONDS);
  return `${digits(number)} ${unit}`.trim();
}

/** 8.03B; as parameters are counted */
export function count(value) {
  const [number, unit] = scaled(value, COUNTS);
  return `${digits(number)}${unit}`;
}

export const integer = (value) => value.toLocaleString("en");

/** 55%, 0.4% */
export function percent(fraction) {
  const value = 100 * fraction;
  if (value > 0 && value < 0.1) return "<0.1%";
  return `${value >= 10 ? Math.round(value).toLocaleString("en") : Number(value.toFixed(1))}%`;
}

/** 1 node, 2 nodes */
export const plural = (n, word) => `${integer(n)} ${word}${n === 1 ? "" : "s"}`;

/** Date and time of a moment in seconds since the epoch, in the reader's own form. */
export function moment(epochSeconds) {
  const options = { dateStyle: "medium", timeStyle: "short" };
  return new Date(epochSeconds * 1000).toLocaleString(undefined, options);
}
