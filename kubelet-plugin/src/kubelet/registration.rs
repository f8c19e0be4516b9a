//! Registers the plugin with the kubelet.

use tokio::sync::watch;
use tonic::{Request, Response, Status};
use tracing::{info, warn};
use tranche_api::names::DRIVER;

use crate::kubelet::proto::pluginregistration::registration_server::Registration;
use crate::kubelet::proto::pluginregistration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};

/// The gRPC services on the DRA socket. The kubelet takes the first of each kind that it knows.
const SERVICES: [&str; 3] = [
    "v1.DRAPlugin",
    "v1.DRAResourceHealth",
    "v1alpha1.DRAResourceHealth",
];

/// The state of the registration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registered {
    /// How often it was registered in the life of this process.
    pub count: u64,
    /// Whether the last notification was a success.
    pub now: bool,
}

/// Answers on the registration socket.
#[derive(Debug)]
pub struct RegistrationService {
    endpoint: String,
    registered: watch::Sender<Registered>,
}

impl RegistrationService {
    /// `endpoint` is the DRA socket's path as the kubelet sees it.
    #[must_use]
    pub fn new(endpoint: String, registered: watch::Sender<Registered>) -> Self {
        Self {
            endpoint,
            registered,
        }
    }
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.endpoint.clone(),
            supported_versions: SERVICES.map(str::to_owned).into(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        self.registered.send_modify(|registered| {
            registered.now = status.plugin_registered;
            registered.count += u64::from(status.plugin_registered);
        });
        if status.plugin_registered {
            info!("registered with the kubelet");
        } else {
            warn!(
                error = status.error,
                "the kubelet did not register the plugin and will retry; see the kubelet's log"
            );
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
