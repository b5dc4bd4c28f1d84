// The heads of the page: their columns, verdicts, and what is unpacked when a head, a text or a layer is opened.

const heads = index.heads;
const placeOf = new Map(heads.id.map((id, place) => [id, place]));
const headAt = new Map(heads.id.map((_, place) => [`${heads.layer[place]}.${heads.head[place]}`, place]));
const controlNames = index.controls;

const shortId = (place) => `${heads.layer[place]}.${heads.head[place]}`;
const verdictOf = (place) => index.verdicts[heads.verdict[place]];

/** Two decimals, for S and its like. */
const hundredths = (value) => (value === null ? MISSING : value.toFixed(2).replace(/^-0\.00$/, "0.00").replace("-", MINUS));

/** A difference of such numbers, with its sign. */
const change = (value) => (value !== null && Math.abs(value) < 0.005 ? "±0.00" : signed(value, hundredths));

/** Spectrum, controls, modes and firings of one head. */
async function headDetail(place) {
  const packed = await part("heads", Math.floor(place / index.headsPerPart));
  return packed[place % index.headsPerPart];
}

/** Title and tokens of one text. */
async function promptOf(place) {
  const packed = await part("prompts", Math.floor(place / index.promptsPerPart));
  const [name, tokens] = packed[place % index.promptsPerPart];
  return { name: vocab[name], tokens };
}

/** What the heads of one layer share. */
async function layerDetail(layer) {
  const place = index.layers.indexOf(layer);
  const packed = await part("layers", Math.floor(place / index.layersPerPart));
  return packed[place % index.layersPerPart];
}

/** Columns of the heads as numbers that the list sorts by and the map is coloured by; `wide`: over several decades. */
const MEASURES = {
  sparsity: { label: "S, mean", write: hundredths, up: true },
  ...Object.fromEntries(controlNames.map((name) => [`under_${name}`, { label: `S under ${name}`, write: hundredths, up: true }])),
  ...Object.fromEntries(controlNames.map((name) => [`effect_${name}`, { label: `S under ${name}, less S`, write: change }])),
  n_recon: { label: "N_recon, median", write: number, up: true },
  cancellation: { label: "Cancellation, median", write: number, up: true, log: true },
  largest_rank: { label: "Largest mode’s place", write: percent },
  n_firings: { label: "Firings", write: number, log: true },
  n_sink: { label: "Firings on the first token", write: hundredths, log: true },
  induction: { label: "Induction", write: hundredths },
  previous: { label: "Previous token", write: hundredths },
  duplicate: { label: "Duplicate token", write: hundredths },
  sink: { label: "Attention to the first token", write: hundredths },
  energy_query: { label: "Energy, query side", write: number, log: true },
  energy_key: { label: "Energy, key side", write: number, log: true },
};
const heldMeasures = Object.keys(MEASURES).filter((name) => heads[name]?.some((value) => value !== null));
/** The explanation of a measure; those of controls say which control. */
const measureHelp = (name) => index.help[name.replace(/^(energy)_.*/, "$1")] ?? index.help[name.replace("n_sink", "sinks").replace("n_firings", "firings")] ?? index.help[`control ${name.replace(/^(under|effect)_/, "")}`];

/** A verdict as its mark and name, in a tag that carries its meaning. */
function verdictTag({ name, mark, colour: fill, meaning }) {
  return el("span", { class: "tag verdict", "data-tip": meaning || null }, verdictMark(mark, fill), name);
}

function verdictMark(mark, fill) {
  return el("i", { class: `mark ${fill ? "" : "bare"}`, "aria-hidden": "true", "--fill": fill ?? "transparent" }, mark);
}
