//! `ui`: a local web page that shows the cluster's GPUs and their holders, live, with the user's own rights.
//!
//! ```text
//!  watch    API server ─► Change: an object was added, changed or removed, or may not be read      (I/O)
//!  trim     objects without what the page does not read                                           (pure)
//!  store    Change ─► objects by node, as small texts; the nodes whose view is out of date        (pure)
//!  readings API server ─► the use of GPUs, every few seconds                                       (I/O)
//!  history  readings of use ─► the last hour by minute                                            (pure)
//!  view     objects of a node ─► model ─► a record: what the page shows of the node               (pure)
//!  records  records ─► the difference to those that a page has                                    (pure)
//!  live     runs store and view, publishes records                                                (I/O)
//!  guard    which requests the server answers                                                     (pure)
//!  server   the page's files, and a stream of events: all records, then differences               (I/O)
//! ```
//!
//! No part of it runs in the cluster, and the page loads nothing from elsewhere: the program contains it.

mod guard;
mod history;
mod live;
mod readings;
mod records;
mod server;
mod store;
mod trim;
mod view;
mod watch;

use std::io;
use std::net::Ipv4Addr;

use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch as channel};

use crate::cluster::Cluster;
use crate::output;
use guard::Guard;
use live::Published;

/// The most changes that wait: a page of a list and a few more.
const CHANGES: usize = 64;

/// Why the page is not served.
#[derive(Debug, thiserror::Error)]
pub enum UiError {
    /// The port cannot be used.
    #[error(
        "cannot serve on 127.0.0.1:{port}: {problem}; choose another with --port, or 0 for any"
    )]
    Listen { port: u16, problem: io::Error },
    #[error("the page's server ended: {0}; start it again")]
    Serve(io::Error),
    /// The URL could not be printed.
    #[error("cannot write the page's address: {0}")]
    Write(io::Error),
    #[error(transparent)]
    Record(#[from] records::RecordError),
}

/// Serves the page on a loopback port until Ctrl-C; 0 is any port.
pub async fn serve(cluster: &Cluster, port: u16) -> Result<(), UiError> {
    let listen = |problem| UiError::Listen { port, problem };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        .await
        .map_err(listen)?;
    let port = listener.local_addr().map_err(listen)?.port();
    let guard = Guard::new(token(), port);
    output::print(&format!("{}\n", guard.url())).map_err(UiError::Write)?;
    output::note(output::Tone::Faint, "open this address; Ctrl-C ends it");
    let (changes, received) = mpsc::channel(CHANGES);
    let (send, readings) = mpsc::channel(1);
    let (publisher, shown) = channel::channel(Published::default());
    let mut tasks = watch::start(cluster, &changes);
    tasks.spawn(readings::follow(cluster.clone(), send));
    let page = axum::serve(listener, server::router(guard, shown));
    tokio::select! {
        ended = page => ended.map_err(UiError::Serve),
        kept = live::keep(received, readings, publisher) => Ok(kept?),
        _ = tokio::signal::ctrl_c() => Ok(()),
    }
}

/// 244 random bits.
fn token() -> String {
    let half = || uuid::Uuid::new_v4().simple();
    format!("{}{}", half(), half())
}
