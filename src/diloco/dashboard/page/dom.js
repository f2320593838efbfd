// Elements without HTML in strings: every text from a run becomes a text node, so that it is shown and never obeyed.
export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";
export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

export const fill = (target, ...children) => target.replaceChildren(...children.filter(Boolean));
export const say = (id, text) => {
  const element = $(id);
  if (element.textContent !== text) element.textContent = text;
};
// Rows [name, value, kind] as the entries of a description list.
export const facts = (rows) => rows.flatMap(([name, value, kind]) =>
  [make("dt", {}, name), make("dd", { class: kind ?? null }, value)]);
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
