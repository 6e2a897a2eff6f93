// Injects a CDI device into an empty container, as a container runtime does, and prints the container's specification.
// Arguments: a directory of CDI specifications, and the device.
package main

import (
	"encoding/json"
	"log"
	"os"

	"github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

func main() {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(os.Args[1]), cdi.WithAutoRefresh(false))
	if err != nil {
		log.Fatal(err)
	}
	container := &specs.Spec{}
	if _, err := cache.InjectDevices(container, os.Args[2]); err != nil {
		log.Fatal(err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(container); err != nil {
		log.Fatal(err)
	}
}
