// Returns a line for each accessibility problem of this page.
const problems = [];
const isShown = (it) => it.checkVisibility({ visibilityProperty: true }) && !it.closest('.unseen, .skip');
const name = (it) => `<${it.tagName.toLowerCase()}${it.id ? ` id=${it.id}` : ''}${it.className && typeof it.className === 'string' ? ` class="${it.className}"` : ''}> ${it.textContent.trim().slice(0, 40)}`;

// Landmarks, headings, language, title.
for (const [selector, count] of [['header', 1], ['main', 1], ['aside', 1], ['h1', 1]]) {
  const found = document.querySelectorAll(selector).length;
  if (found !== count) problems.push(`${found} ${selector} instead of ${count}`);
}
if (!document.documentElement.lang) problems.push('the page has no language');
if (!document.title) problems.push('the page has no title');
let level = 0;
for (const heading of document.querySelectorAll('h1, h2, h3, h4')) {
  if (!heading.checkVisibility()) continue;
  const own = Number(heading.tagName[1]);
  if (own > level + 1) problems.push(`a heading leaves a level out: ${name(heading)}`);
  level = own;
}

// Names, references.
const ids = [...document.querySelectorAll('[id]')].map((it) => it.id);
for (const id of new Set(ids.filter((id, nth) => ids.indexOf(id) !== nth))) problems.push(`two elements have the id ${id}`);
for (const attribute of ['aria-labelledby', 'aria-describedby', 'aria-controls']) {
  for (const it of document.querySelectorAll(`[${attribute}]`)) {
    for (const id of isShown(it) ? it.getAttribute(attribute).split(' ') : []) {
      if (!document.getElementById(id)) problems.push(`${attribute} names nothing: ${name(it)}`);
    }
  }
}
for (const it of document.querySelectorAll('button, input, a, select')) {
  const label = it.labels?.[0]?.textContent ?? it.getAttribute('aria-label') ?? it.textContent;
  if (!label.trim()) problems.push(`no name: ${name(it)}`);
}
for (const it of document.querySelectorAll('img, svg, canvas')) {
  if (!it.getAttribute('aria-label') && !it.alt && it.getAttribute('aria-hidden') !== 'true') problems.push(`a picture without words: ${name(it)}`);
}
for (const it of document.querySelectorAll('[tabindex]')) {
  if (it.tabIndex > 0) problems.push(`a place of its own in the order of Tab: ${name(it)}`);
}

// Contrast.
const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
function rgba(colour) {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
  return { rgb: [r, g, b], a: a / 255 };
}
function luminance(rgb) {
  const [r, g, b] = rgb.map((it) => it / 255).map((it) => (it <= 0.04045 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function contrast(one, other) {
  const [a, b] = [luminance(one), luminance(other)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}
function ground(it) {
  for (let at = it; at; at = at.parentElement) {
    const { rgb, a } = rgba(getComputedStyle(at).backgroundColor);
    if (a === 1) return rgb;
  }
  return [255, 255, 255];
}
let compared = 0;
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let text = texts.nextNode(); text; text = texts.nextNode()) {
  const it = text.parentElement;
  if (!text.textContent.trim() || !isShown(it) || ['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(it.tagName)) continue;
  const style = getComputedStyle(it);
  const size = parseFloat(style.fontSize);
  const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  const ratio = contrast(rgba(style.color).rgb, ground(it));
  compared += 1;
  if (ratio < (isLarge ? 3 : 4.5)) problems.push(`contrast ${ratio.toFixed(2)}: ${name(it)}`);
}
if (compared < 20) problems.push(`only ${compared} texts were compared`);
const variable = (it) => rgba(getComputedStyle(document.documentElement).getPropertyValue(it)).rgb;
for (const tier of ['exclusive', 'partition', 'capped', 'concurrent', 'timeshared', 'passthrough']) {
  for (const under of ['surface', 'track']) {
    const ratio = contrast(variable(`--${tier}`), variable(`--${under}`));
    if (ratio < 3) problems.push(`contrast ${ratio.toFixed(2)}: ${tier} on ${under}`);
  }
}

// Width.
const { scrollWidth, clientWidth } = document.documentElement;
if (scrollWidth > clientWidth) problems.push(`the page is ${scrollWidth} px wide where ${clientWidth} are visible`);
for (const it of document.querySelectorAll('main *, aside *')) {
  if (isShown(it) && it.getBoundingClientRect().right > clientWidth + 1 && !it.closest('[aria-hidden]')) problems.push(`out of the page on the right: ${name(it)}`);
}
return problems;
