// The embedded data: the index at once, the packed parts when something in them is opened.

const index = JSON.parse(byId("index").textContent);
const vocab = index.vocab;

/** The unpacked contents of a data element, as a Response. */
function inflate(id) {
  const packed = atob(byId(id).textContent);
  const bytes = new Uint8Array(packed.length);
  for (let place = 0; place < packed.length; place += 1) bytes[place] = packed.charCodeAt(place);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
}

const opened = new Map();

/** Part `number` of a kind ("units", "texts", "heads", ...), unpacked once. */
function part(kind, number) {
  const id = `${kind}-${number}`;
  if (!opened.has(id)) opened.set(id, inflate(id).json());
  return opened.get(id);
}
