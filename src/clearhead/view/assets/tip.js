// One floating explanation for everything that carries `data-tip`, on hover and on focus.

const tip = byId("tip");
let tipOwner = null;

/** A `?` that says `text`; null when there is nothing to say. */
function explain(text, label) {
  return text ? el("button", { type: "button", class: "help", "aria-label": `About ${label}: ${text}`, "data-tip": text }, "?") : null;
}

/** The `?` of a number named in the explanations. */
function help(name, label = name.replaceAll("_", " ")) {
  return explain(index.help[name], label);
}

function showTip(owner) {
  tipOwner = owner;
  tip.textContent = owner.dataset.tip;
  tip.hidden = false;
  const around = owner.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const left = Math.min(Math.max(around.left + around.width / 2 - size.width / 2, 12), innerWidth - size.width - 12);
  const below = around.bottom + 8 + size.height < innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${below ? around.bottom + 8 : Math.max(8, around.top - size.height - 8)}px`;
}

function hideTip() {
  tipOwner = null;
  tip.hidden = true;
}

for (const [enter, leave] of [["mouseover", "mouseout"], ["focusin", "focusout"]]) {
  document.addEventListener(enter, (event) => {
    const owner = event.target.closest?.("[data-tip]");
    if (owner) showTip(owner);
  });
  document.addEventListener(leave, (event) => {
    if (tipOwner && !tipOwner.contains(event.relatedTarget)) hideTip();
  });
}
document.addEventListener("scroll", hideTip, { capture: true, passive: true });
