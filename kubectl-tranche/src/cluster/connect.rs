//! Makes a client from the kubeconfig and the flags that kubectl has.

use std::path::PathBuf;
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};

use super::Cluster;

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(10);
/// How long an answer may take. It is long because kubectl, too, waits for slow lists.
pub(crate) const ANSWER: Duration = Duration::from_mins(1);

/// The cluster and the user: kubectl's flags of the same names.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Connection {
    /// The kubeconfig file; else $KUBECONFIG, ~/.kube/config, or the pod's service account
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// The cluster of the kubeconfig
    #[arg(long, global = true, value_name = "NAME")]
    pub cluster: Option<String>,
    /// The user of the kubeconfig
    #[arg(long, global = true, value_name = "NAME")]
    pub user: Option<String>,
    /// The user to impersonate
    #[arg(long = "as", global = true, value_name = "USER")]
    pub impersonate: Option<String>,
    /// A group to impersonate; may be given several times
    #[arg(long = "as-group", global = true, value_name = "GROUP")]
    pub impersonate_groups: Vec<String>,
    /// The namespace of claims and pods; else that of the context
    #[arg(long, short, global = true, value_name = "NAME")]
    pub namespace: Option<String>,
    /// The namespace in which Tranche runs
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        default_value = "tranche-system"
    )]
    pub system_namespace: String,
}

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The file that the flag names cannot be read.
    #[error("cannot read the kubeconfig {}: {source}; name another with --kubeconfig", path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: KubeconfigError,
    },
    /// A file that the variable names cannot be read.
    #[error("cannot read {}, which KUBECONFIG names: {source}; correct KUBECONFIG, or name a file with --kubeconfig", path.display())]
    Variable {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The context, cluster or user does not exist.
    #[error(
        "the kubeconfig does not describe the cluster: {0}; check --context, --cluster, --user and `kubectl config view`"
    )]
    Context(KubeconfigError),
    /// There is no kubeconfig and no service account.
    #[error("there is no kubeconfig: set KUBECONFIG or name a file with --kubeconfig")]
    NoKubeconfig,
    /// The credentials cannot be used, such as certificates or a program that gets a token.
    #[error("cannot use the credentials of the kubeconfig: {}; check the user of the context", crate::cluster::problem::root(.0))]
    Client(kube::Error),
}

impl Connection {
    /// Makes a client. It does not call the API server.
    pub async fn connect(&self) -> Result<Cluster, ConnectError> {
        let mut config = self.config().await?;
        config.connect_timeout = Some(CONNECT);
        config.read_timeout = Some(ANSWER);
        // The client would send what the API server refuses with 429 or 503 again for minutes: an eviction that a budget does not
        // allow, and a list of an API whose server is away.
        config.default_retry = false;
        // An unused connection does not time out.
        config.reset_reader_on_write = true;
        if let Some(user) = &self.impersonate {
            config.auth_info.impersonate = Some(user.clone());
        }
        if !self.impersonate_groups.is_empty() {
            config.auth_info.impersonate_groups = Some(self.impersonate_groups.clone());
        }
        let namespace = self
            .namespace
            .clone()
            .unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).map_err(ConnectError::Client)?;
        Ok(Cluster::new(client, &namespace, &self.system_namespace))
    }

    async fn config(&self) -> Result<Config, ConnectError> {
        let options = KubeConfigOptions {
            context: self.context.clone(),
            cluster: self.cluster.clone(),
            user: self.user.clone(),
        };
        if let Some(path) = &self.kubeconfig {
            let file = Kubeconfig::read_from(path).map_err(|source| ConnectError::File {
                path: path.clone(),
                source,
            })?;
            let config = Config::from_custom_kubeconfig(file, &options).await;
            return config.map_err(ConnectError::Context);
        }
        match Config::from_kubeconfig(&options).await {
            Ok(config) => Ok(config),
            Err(KubeconfigError::ReadConfig(source, path))
                if std::env::var_os("KUBECONFIG").is_some_and(|it| !it.is_empty()) =>
            {
                Err(ConnectError::Variable { path, source })
            }
            Err(KubeconfigError::ReadConfig(..) | KubeconfigError::FindPath) => {
                Config::incluster().map_err(|_| ConnectError::NoKubeconfig)
            }
            Err(error) => Err(ConnectError::Context(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_is_named() {
        let error = ConnectError::Variable {
            path: "/nowhere/config".into(),
            source: std::io::ErrorKind::NotFound.into(),
        };
        let text = error.to_string();
        assert!(
            text.starts_with("cannot read /nowhere/config, which KUBECONFIG names"),
            "{text}"
        );
    }
}
