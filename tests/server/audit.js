// What a page has wrong for those who do not see it, see it badly, or use no mouse: a list of findings, one line each.
() => {
  const found = [];
  const all = (selector) => [...document.querySelectorAll(selector)];
  const at = (element) => element.outerHTML.slice(0, 120);
  const visible = (element) => element.checkVisibility({ visibilityProperty: true }) && element.getClientRects().length > 0;

  // Structure.
  if (document.documentElement.lang !== "en") found.push("no language");
  if (!document.title) found.push("no title");
  for (const landmark of ["main", "header", "footer"]) {
    if (all(landmark).length !== 1) found.push(`${all(landmark).length} of ${landmark}`);
  }
  const labels = all("nav").map((nav) => nav.getAttribute("aria-label"));
  if (labels.includes(null) || new Set(labels).size !== labels.length) found.push(`names of nav: ${labels}`);
  let level = 0;
  for (const heading of all("h1, h2, h3, h4, h5, h6")) {
    const next = Number(heading.tagName[1]);
    if (next > level + 1) found.push(`heading jumps to ${next}: ${heading.textContent}`);
    level = next;
  }
  if (all("h1").length !== 1) found.push(`${all("h1").length} of h1`);
  for (const id of new Set(all("[id]").map((element) => element.id))) {
    if (all(`[id="${id}"]`).length !== 1) found.push(`id twice: ${id}`);
  }
  for (const table of all("table")) {
    if (!table.querySelector("thead th") || !table.querySelector("tbody th[scope=row]")) found.push(`heads of ${at(table)}`);
    for (const head of table.querySelectorAll("th")) {
      if (!head.scope || !head.textContent.trim()) found.push(`a head without scope or text: ${at(head)}`);
    }
  }

  // Names of what can be used and of what is shown by a picture.
  const name = (element) => {
    const by = (element.getAttribute("aria-labelledby") ?? "").split(" ").filter(Boolean);
    const text = by.map((id) => document.getElementById(id)?.textContent ?? "").join(" ");
    const label = element.labels ? [...element.labels].map((one) => one.textContent).join(" ") : "";
    return (text || element.getAttribute("aria-label") || label || element.textContent).trim();
  };
  for (const element of all("a, button, summary, [role=img], [role=region], progress, section")) {
    if (!name(element)) found.push(`no name: ${at(element)}`);
  }
  for (const element of all("input, select")) {
    if (element.labels.length !== 1 || !element.labels[0].textContent.trim()) found.push(`no label: ${at(element)}`);
  }
  for (const svg of all("svg")) {
    if (svg.getAttribute("role") !== "img" && svg.getAttribute("aria-hidden") !== "true") found.push(`svg: ${at(svg)}`);
  }
  if (!all("[role=status]").every((element) => element.textContent.trim())) found.push("an empty status");
  for (const box of all(".scroll")) {
    if (box.tabIndex !== 0) found.push(`cannot be scrolled by keys: ${at(box)}`);
  }

  // Contrast, WCAG 2 AA: 4.5 for text, 3 for large text and for what a drawing must show.
  const parse = (colour) => {
    const [r, g, b, a = 1] = colour.match(/[\d.]+/g).map(Number);
    return { rgb: [r, g, b], a };
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = (element) => {
    for (let up = element; up; up = up.parentElement) {
      const { rgb, a } = parse(getComputedStyle(up).backgroundColor);
      if (a === 1) return rgb;
      if (a !== 0) found.push(`half transparent: ${at(up)}`);
    }
    return [255, 255, 255];
  };
  let texts = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !visible(element) || element.closest("title, .hidden, option")) continue;
    const style = getComputedStyle(element);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const ratio = contrast(parse(element.closest("svg") ? style.fill : style.color).rgb, behind(element));
    texts += 1;
    if (ratio < (isLarge ? 3 : 4.5)) found.push(`contrast ${ratio.toFixed(2)}: ${at(element)}`);
  }
  if (texts === 0) found.push("no text was looked at");
  const graphics = (what, one, other) => {
    const ratio = contrast(parse(one).rgb, parse(other).rgb);
    if (ratio < 3) found.push(`contrast ${ratio.toFixed(2)} of ${what}`);
  };
  for (const field of all("input, select")) {
    graphics(`the border of ${field.id}`, getComputedStyle(field).borderTopColor, getComputedStyle(field).backgroundColor);
  }
  for (const pattern of all("pattern")) {
    const [back, mark] = pattern.children;
    const { stroke, fill } = getComputedStyle(mark);
    graphics(pattern.id, stroke === "none" ? fill : stroke, getComputedStyle(back).fill);
  }
  for (const svg of all("svg.space")) {
    const back = getComputedStyle(svg.querySelector(".left")).fill;
    graphics("the winner", getComputedStyle(svg.querySelector(".winner")).fill, back);
    graphics("the shortlist", getComputedStyle(svg.querySelector(".ring")).stroke, back);
    graphics("the frame", getComputedStyle(svg.querySelector(".frame")).stroke, back);
  }

  // Nothing is wider than the window.
  const { scrollWidth, clientWidth } = document.documentElement;
  if (scrollWidth > clientWidth) {
    const wide = all("body *").filter((e) => e.getBoundingClientRect().right > clientWidth + 1 && !e.closest(".scroll"));
    found.push(`${scrollWidth} pixels in a window of ${clientWidth}: ${wide.slice(0, 3).map(at).join(" | ")}`);
  }
  return found;
}
