//! A GET on an existing stream, for tests.

use std::io;

use axum::body::Body;
use axum::http::Request;
use axum::http::header::AUTHORIZATION;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::client::Client;

/// The most that is read.
const LIMIT: usize = 64 << 20;

/// Status and body of a GET over TLS on `stream`, with a bearer token if given.
pub async fn get(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    path: &str,
    token: Option<&str>,
) -> io::Result<(u16, String)> {
    let client = Client::new().map_err(io::Error::other)?;
    let mut builder = Request::get(path);
    if let Some(token) = token {
        builder = builder.header(AUTHORIZATION, format!("Bearer {token}"));
    }
    let request = builder.body(Body::empty()).map_err(io::Error::other)?;
    let answer = client.send(stream, request, LIMIT).await;
    let (status, body) = answer.map_err(io::Error::other)?;
    let body = String::from_utf8(body.into()).map_err(io::Error::other)?;
    Ok((status.as_u16(), body))
}
