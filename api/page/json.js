// Where a JSON text breaks. Browsers differ in whether their own error says so.

const SPACE = /[ \t\n\r]*/y;
const STRING = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;
const SCALAR = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null/y;

class Fault extends Error {
  constructor(at, message) {
    super(message);
    this.at = at;
  }
}

/** Reads one value from `at` on; gives where it ends. */
function value(text, at) {
  const take = (pattern, from) => {
    pattern.lastIndex = from;
    return pattern.test(text) ? pattern.lastIndex : null;
  };
  const skip = (from) => take(SPACE, from);
  const wanted = (from, what) => {
    const found = from >= text.length ? "the end" : JSON.stringify(text[from]);
    return new Fault(Math.min(from, text.length), `found ${found} where ${what} is expected`);
  };
  const string = (from, what) => {
    const end = text[from] === '"' ? take(STRING, from) : null;
    if (end !== null) return end;
    if (text[from] !== '"') throw wanted(from, what);
    throw new Fault(from, "this text has no end, or holds a character that must be written as an escape");
  };
  const list = (from, close, item) => {
    let here = skip(from + 1);
    if (text[here] === close) return here + 1;
    for (;;) {
      here = skip(item(here));
      if (text[here] === close) return here + 1;
      if (text[here] !== ",") throw wanted(here, `"," or "${close}"`);
      here = skip(here + 1);
      if (text[here] === close) throw new Fault(here, `there is a comma before "${close}"`);
    }
  };
  const start = skip(at);
  if (text[start] === "{") {
    return list(start, "}", (from) => {
      const colon = skip(string(from, "a name in quotes"));
      if (text[colon] !== ":") throw wanted(colon, '":"');
      return value(text, colon + 1);
    });
  }
  if (text[start] === "[") return list(start, "]", (from) => value(text, from));
  if (text[start] === '"') return string(start, "");
  const end = take(SCALAR, start);
  if (end === null) throw wanted(start, "a value");
  return end;
}

/** What is wrong with a JSON text and where: {at, message} with line and column; null if nothing. */
export function jsonFault(text) {
  try {
    JSON.parse(text);
    return null;
  } catch (error) {
    let [at, what] = [text.length, error.message];
    try {
      SPACE.lastIndex = value(text, 0);
      SPACE.test(text);
      [at, what] = [SPACE.lastIndex, "there is more after the end of the value"];
    } catch (fault) {
      if (fault instanceof Fault) [at, what] = [fault.at, fault.message];
      // Anything else is a text nested too deep for this reader: the browser's own words stand.
    }
    const before = text.slice(0, at).split("\n");
    return { at, message: `Line ${before.length}, column ${before.at(-1).length + 1}: ${what}` };
  }
}
