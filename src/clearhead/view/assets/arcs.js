// Arcs from the source tokens of a z pattern to the token that reads them.

/** Where an arc touches a token: the middle of the top of its word's widest box (it may break over two lines). */
function foot(token, origin) {
  const box = [...token.querySelector(".word").getClientRects()].reduce((a, b) => (b.width > a.width ? b : a));
  return { x: box.left + box.width / 2 - origin.left, y: box.top - origin.top + 3 };
}

/**
 * Draw one arc per source into `layer`. `sources` holds {token, share}; share is signed, a fraction of Σ|w|.
 * Width and opacity follow the size of the share; subtracting sources are dashed, so colour is not alone.
 */
function drawArcs(layer, query, sources) {
  layer.replaceChildren();
  const origin = layer.getBoundingClientRect();
  const end = foot(query, origin);
  const largest = Math.max(...sources.map((source) => Math.abs(source.share)), 1e-9);
  const byShare = sources.map((source, place) => ({ ...source, place })).sort((a, b) => Math.abs(a.share) - Math.abs(b.share));
  for (const { token, share, place } of byShare) {
    const strength = Math.abs(share) / largest;
    layer.append(
      svg("path", {
        d: arcPath(foot(token, origin), end),
        class: share < 0 ? "subtracts" : "adds",
        "data-source": place,
        "stroke-width": (1 + 3 * strength).toFixed(2),
        "stroke-opacity": (0.25 + 0.6 * strength).toFixed(2),
      }),
    );
  }
  layer.append(svg("circle", { cx: end.x, cy: end.y, r: 3 }));
}

function arcPath(start, end) {
  const across = Math.abs(end.x - start.x);
  if (across < 1 && Math.abs(end.y - start.y) < 1) {
    return `M ${start.x - 4} ${start.y} c -8 -14, 16 -14, 8 0`;
  }
  const sameLine = Math.abs(end.y - start.y) < 4;
  const lift = sameLine ? Math.min(6 + across * 0.09, 20) : 16;
  return `M ${start.x} ${start.y} C ${start.x} ${start.y - lift}, ${end.x} ${end.y - lift}, ${end.x} ${end.y}`;
}
