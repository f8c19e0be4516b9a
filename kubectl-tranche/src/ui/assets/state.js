// The records that the server sends: first all records, then changes. A record has a key and the content of one thing on the page.

/** Milliseconds without a message from the server after which the connection counts as lost. */
const SILENCE = 15_000;

/**
 * Connects, and stays connected.
 * @param onRecords called with all records and the keys that changed
 * @param onState called with "live" or "lost"
 */
export function connect(onRecords, onState) {
  const records = new Map();
  let seq = null;
  let source = null;
  let heard = Date.now();

  function hear() {
    heard = Date.now();
    onState('live');
  }

  function take(message, set) {
    const changed = new Set();
    for (const key of message.gone ?? []) {
      records.delete(key);
      changed.add(key);
    }
    for (const [key, record] of Object.entries(set)) {
      records.set(key, record);
      changed.add(key);
    }
    seq = message.seq;
    hear();
    onRecords(records, changed);
  }

  function open() {
    source?.close();
    source = new EventSource('/events');
    // A new stream begins with all records; other records are gone.
    source.addEventListener('state', (event) => {
      const message = JSON.parse(event.data);
      message.gone = [...records.keys()].filter((key) => !(key in message.records));
      take(message, message.records);
    });
    source.addEventListener('delta', (event) => {
      const message = JSON.parse(event.data);
      // A change was missed: start again.
      if (message.since !== seq) open();
      else take(message, message.set);
    });
    source.addEventListener('alive', hear);
    source.addEventListener('error', () => onState('lost'));
  }

  open();
  setInterval(() => {
    if (Date.now() - heard < SILENCE) return;
    onState('lost');
    heard = Date.now();
    open();
  }, 1000);
}

/** An element with attributes and children; a child that is null is left out. Text is text, never HTML. */
export function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    made.setAttribute(key, value === true ? '' : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** A tier's mark: its colour and its pattern. Its name is beside it. */
export function mark(tier) {
  return element('span', { class: `mark tier-${tier ?? 'free'}`, 'aria-hidden': 'true' });
}

/** The name of a tenant: its pods, or its claim. */
export function who(tenant) {
  const [first, ...others] = tenant.pods;
  const name = first ?? tenant.claim;
  return `${tenant.namespace}/${name}${others.length ? ` +${others.length}` : ''}`;
}
