//! Headless Chromium, driven by WebDriver. `e2e/browser/install` installs both from Debian.

use std::process::Stdio;

use anyhow::{Context, ensure};
use fantoccini::actions::{InputSource, KeyAction, KeyActions};
use fantoccini::key::Key;
use fantoccini::wd::{TimeoutConfiguration, WebDriverCompatibleCommand};
use fantoccini::{Client, ClientBuilder};
use http::Method;
use hyper_util::client::legacy::connect::HttpConnector;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use url::{ParseError, Url};

use crate::wait::{self, Limit};

/// A container has no sandbox and no GPU, and the test sends nothing to other machines.
const FLAGS: [&str; 9] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
];

/// The fewest frames that a page draws in a second. A machine too busy for that gets longer limits.
const FRAMES: u64 = 30;

/// A browser with one page and a profile of its own.
#[derive(Debug)]
pub struct Browser {
    client: Client,
    _driver: Driver,
    _profile: TempDir,
}

/// chromedriver. It leads a process group that includes Chromium, so that a failed test leaves neither behind.
#[derive(Debug)]
struct Driver(Child);

impl Drop for Driver {
    fn drop(&mut self) {
        // Nobody has waited for chromedriver, so its process ID is still valid.
        let id = self.0.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        if let Some(id) = id {
            let _ = kill_process_group(id, Signal::KILL);
        }
    }
}

/// The size and theme of a page.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// Pixels.
    pub width: u32,
    /// Pixels.
    pub height: u32,
    /// Whether the user prefers dark.
    pub is_dark: bool,
}

/// A command that only Chromium's WebDriver has.
#[derive(Debug)]
struct Vendor {
    path: &'static str,
    body: Value,
}

impl WebDriverCompatibleCommand for Vendor {
    fn endpoint(&self, base: &Url, session: Option<&str>) -> Result<Url, ParseError> {
        base.join(&format!(
            "session/{}/{}",
            session.unwrap_or_default(),
            self.path
        ))
    }

    fn method_and_body(&self, _: &Url) -> (Method, Option<String>) {
        (Method::POST, Some(self.body.to_string()))
    }
}

impl Browser {
    /// Starts it.
    pub async fn start() -> anyhow::Result<Self> {
        let mut driver = Command::new("chromedriver")
            .arg("--port=0")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("running chromedriver: e2e/browser/install installs it")?;
        let output = driver.stdout.take().context("chromedriver's output")?;
        let driver = Driver(driver);
        let mut lines = BufReader::new(output).lines();
        let port = loop {
            let line = lines.next_line().await?.context("chromedriver ended")?;
            if let Some((_, port)) = line.split_once("started successfully on port ") {
                break port.trim_end_matches('.').to_owned();
            }
        };
        let profile = tempfile::tempdir()?;
        let folder = format!("--user-data-dir={}", profile.path().display());
        let arguments: Vec<&str> = FLAGS.into_iter().chain([folder.as_str()]).collect();
        let capabilities = json!({
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        });
        let wanted = capabilities.as_object().cloned().unwrap_or_default();
        let client = ClientBuilder::new(HttpConnector::new())
            .capabilities(wanted)
            .connect(&format!("http://127.0.0.1:{port}"))
            .await?;
        let longest = wait::USUAL.ceiling();
        let patience = TimeoutConfiguration::new(Some(longest), Some(longest), None);
        client.update_timeouts(patience).await?;
        Ok(Self {
            client,
            _driver: driver,
            _profile: profile,
        })
    }

    /// Opens a page.
    pub async fn open(&self, url: &str) -> anyhow::Result<()> {
        Ok(self.client.goto(url).await?)
    }

    /// The result of a script, which is the body of a function.
    pub async fn evaluate<T: DeserializeOwned>(&self, script: &str) -> anyhow::Result<T> {
        let value = self
            .client
            .execute(script, Vec::new())
            .await
            .with_context(|| script.to_owned())?;
        serde_json::from_value(value).with_context(|| script.to_owned())
    }

    /// Runs a script before each frame of the page until its value is neither false nor empty, and returns that value. Fails when
    /// `limit` is over and the page has drawn the frames of that time.
    pub async fn wait_for<T: DeserializeOwned>(
        &self,
        what: &str,
        limit: Limit,
        script: &str,
    ) -> anyhow::Result<T> {
        let wait = format!(
            "const [limit, frames, done] = arguments, end = performance.now() + limit;\n\
             const look = () => {{ {script} }};\n\
             (function again(drawn) {{\n\
               const it = look();\n\
               if (it) done({{it}}); else if (performance.now() > end && drawn > frames) done({{}});\n\
               else requestAnimationFrame(() => again(drawn + 1));\n\
             }})(0);"
        );
        let limit_millis = limit.seconds() * 1000;
        let frames = limit.seconds() * FRAMES;
        let mut answer = self
            .client
            .execute_async(&wait, vec![limit_millis.into(), frames.into()])
            .await?;
        let Some(value) = answer.get_mut("it") else {
            let text: String = self.evaluate("return document.body.innerText").await?;
            anyhow::bail!("{what}: not after {limit_millis} ms; the page says:\n{text}");
        };
        Ok(serde_json::from_value(value.take())?)
    }

    /// Presses a key on the focused element.
    pub async fn press(&self, key: Key) -> anyhow::Result<()> {
        let value = char::from(key);
        let press = KeyActions::new("keyboard".into())
            .then(KeyAction::Down { value })
            .then(KeyAction::Up { value });
        Ok(self.client.perform_actions(press).await?)
    }

    /// Sets the size of the page and the user's theme.
    pub async fn look(&self, view: View) -> anyhow::Result<()> {
        let size = json!({
            "width": view.width, "height": view.height, "deviceScaleFactor": 1, "mobile": view.width < 600,
        });
        self.devtools("Emulation.setDeviceMetricsOverride", size)
            .await?;
        let scheme = if view.is_dark { "dark" } else { "light" };
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.devtools("Emulation.setEmulatedMedia", features)
            .await?;
        let width: u32 = self.evaluate("return innerWidth").await?;
        ensure!(width == view.width, "the page is {width} px wide");
        Ok(())
    }

    async fn devtools(&self, command: &str, parameters: Value) -> anyhow::Result<Value> {
        let command = Vendor {
            path: "goog/cdp/execute",
            body: json!({"cmd": command, "params": parameters}),
        };
        Ok(self.client.issue_cmd(command).await?)
    }

    /// The warnings and errors that the page and the browser wrote to the console since the last call.
    pub async fn complaints(&self) -> anyhow::Result<Vec<String>> {
        let command = Vendor {
            path: "se/log",
            body: json!({"type": "browser"}),
        };
        let entries = self
            .client
            .issue_cmd(command)
            .await?
            .as_array()
            .cloned()
            .unwrap_or_default();
        let bad = entries
            .iter()
            .filter(|it| it["level"] == "SEVERE" || it["level"] == "WARNING");
        Ok(bad.map(|it| it["message"].to_string()).collect())
    }

    /// Ends it.
    pub async fn close(self) -> anyhow::Result<()> {
        Ok(self.client.close().await?)
    }
}
