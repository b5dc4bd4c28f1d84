// Pins and supernodes: units kept in sight, and named groups of them, saved in the form of the graph's own folder.

const RINGS = ["#d9971e", "#1f9e93", "#a05fd0", "#d4546a", "#3f83d9", "#7a8b2d", "#c0622f", "#5a6b85"];
let groups = structuredClone(index.supernodes);
let memberships = new Map();
const ringOf = (group) => RINGS[group % RINGS.length];
const groupOf = (place) => memberships.get(place) ?? null;
const membersOf = (group) => groups[group].units.map((name) => placeOf.get(name)).filter((place) => place !== undefined);

const groupBar = el("div", { class: "groups" });
const opener = el("input", { type: "file", accept: ".json,application/json", hidden: true, onchange: () => opener.files[0]?.text().then(loadGroups) });

function fillGroups() {
  memberships = new Map();
  groups.forEach((_, group) => membersOf(group).forEach((place) => memberships.has(place) || memberships.set(place, group)));
  const pins = [...sight.pinned];
  const name = el("input", { type: "text", id: "group-name", placeholder: "Name of a group…", "aria-label": "Name of the group of all pinned units", maxlength: 80, onkeydown: (event) => event.key === "Enter" && group() });
  const group = () => {
    const text = name.value.trim();
    if (!text) return name.focus();
    if (groups.some((entry) => entry.name === text)) return sayOfGroups(`There is a group ${quoted(text)} already; give another name.`);
    groups.push({ name: text, units: pins.map((place) => units.id[place]) });
    sight.pinned.clear();
    fillGroups();
    drawGraph();
    location.hash = `group.${groups.length - 1}`;
  };
  const chips = groups.map((entry, place) => {
    const chip = el("a", { class: "group-chip", href: `#group.${place}` }, el("i"), `${entry.name} (${number(entry.units.length)})`);
    chip.style.setProperty("--ring", ringOf(place));
    return chip;
  });
  const button = (words, id, act, about) => el("button", { type: "button", class: "plain", id, onclick: act, title: about }, words);
  groupBar.replaceChildren(
    el("span", { class: "pins" }, pins.length ? `${plural(pins.length, "pinned unit")}` : "Groups", help("supernodes", "pins and groups")),
    ...(pins.length ? [name, button("Group", "make-group", group, "Make a named group of the pinned units"), button("Unpin all", "unpin", () => { sight.pinned.clear(); fillGroups(); drawGraph(); }, "Forget the pins")] : []),
    ...chips,
    el("span", { class: "files" }, button("Download", "save-groups", saveGroups, "The groups and pins as JSON"), button("Load", "load-groups", () => opener.click(), "Groups and pins that this page saved"), opener),
  );
}

function togglePin(place) {
  if (!sight.pinned.delete(place)) sight.pinned.add(place);
  fillGroups();
  drawGraph();
  const pin = byId("pin");
  if (pin && sight.chosen !== null) pin.textContent = sight.pinned.has(sight.chosen) ? "Unpin" : "Pin";
}

function savedGroups() {
  const { model, prompt } = index.about;
  return { model, prompt, pinned: [...sight.pinned].map((place) => units.id[place]), supernodes: groups };
}

function saveGroups() {
  const address = URL.createObjectURL(new Blob([JSON.stringify(savedGroups(), null, 1)], { type: "application/json" }));
  el("a", { href: address, download: "supernodes.json" }).click();
  URL.revokeObjectURL(address);
}

/** Groups and pins out of a file of this page or a graph's own graph.json; what does not fit is said, never dropped silently. */
function loadGroups(text) {
  let read = null;
  try {
    read = JSON.parse(text);
  } catch {
    return sayOfGroups("This file is no JSON.");
  }
  const isNames = (value) => Array.isArray(value) && value.every((name) => typeof name === "string");
  const supernodes = read?.supernodes;
  const pinned = read?.pinned ?? [];
  if (!Array.isArray(supernodes) || !supernodes.every((entry) => typeof entry?.name === "string" && isNames(entry.units)) || !isNames(pinned)) {
    return sayOfGroups("This file holds no groups: it needs `supernodes`, a list of {name, units}.");
  }
  groups = supernodes.map(({ name, units: names }) => ({ name, units: names }));
  sight.pinned = new Set(pinned.map((name) => placeOf.get(name)).filter((place) => place !== undefined));
  const absent = [...groups.flatMap((entry) => entry.units), ...pinned].filter((name) => !placeOf.has(name));
  fillGroups();
  drawGraph();
  return sayOfGroups(`Loaded ${plural(groups.length, "group")}.${absent.length ? ` ${plural(absent.length, "unit")} of theirs not in this graph, as ${absent[0]}.` : ""}`);
}

function sayOfGroups(text) {
  groupBar.querySelector(".said")?.remove();
  groupBar.append(el("span", { class: "said", role: "status" }, text));
}

function renameGroup(group, field) {
  const text = field.value.trim();
  const taken = groups.some((entry, place) => place !== group && entry.name === text);
  if (text && !taken) groups[group].name = text;
  fillGroups();
  if (taken) sayOfGroups(`There is a group ${quoted(text)} already.`);
  field.value = groups[group].name;
}

/** A group: its members, and Σ weight between it and the other groups. */
function showGroup(group) {
  const members = membersOf(group);
  const absent = groups[group].units.length - members.length;
  const others = groups.map((other, place) => [other.name, membersOf(place), place]).filter(([, , place]) => place !== group);
  // targets outside groups stand for themselves: what a group does to the answer is the first question
  const alone = units.id.map((_, place) => place).filter((place) => isTarget(place) && groupOf(place) === null && !members.includes(place));
  const sum = (numbers, end, theirs) => members.reduce((total, unit) => total + numbers[unit].filter((edge) => theirs.has(end[edge])).reduce((part, edge) => part + edges.weight[edge], 0), 0);
  const sums = [...others.map(([name, theirs]) => [name, new Set(theirs)]), ...alone.map((place) => [unitLink(units.id[place]), new Set([place])])].map(([name, theirs]) => [name, sum(into, edges.source, theirs), sum(outOf, edges.target, theirs)]);
  const largest = Math.max(...sums.flatMap(([, a, b]) => [Math.abs(a), Math.abs(b)]), 0);
  const rename = el("input", { type: "text", "aria-label": "Name of this group", value: groups[group].name, maxlength: 80, onchange: () => renameGroup(group, rename) });
  const dissolve = el("button", { type: "button", class: "plain", id: "dissolve", onclick: () => { groups.splice(group, 1); fillGroups(); drawGraph(); location.hash = "summary"; } }, "Dissolve");
  const pinAll = el("button", { type: "button", class: "plain", onclick: () => { members.forEach((place) => sight.pinned.add(place)); fillGroups(); drawGraph(); } }, "Pin all");
  return [
    el("div", { class: "title group-title" }, el("h2", {}, groups[group].name), rename, pinAll, dissolve),
    panel("Members", help("supernodes", "groups"), el("ul", { class: "members" }, ...members.map((place) => el("li", {}, unitLink(units.id[place])))), absent ? el("p", { class: "hint" }, `${plural(absent, "unit")} of this group not in this graph.`) : nothing()),
    panel("To and from other groups and the output", help("between", "sums between groups"), longTable([["group", "", "unit-cell"], ["from it", "", "bar-cell"], ["to it", "", "bar-cell"]], sums.map(([name, a, b]) => [name, signedBar(a, largest), signedBar(b, largest)]), "", "There is nothing else.")),
  ];
}
