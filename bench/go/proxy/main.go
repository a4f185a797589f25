// Proxy is the reference: net/http/httputil.ReverseProxy as people set it up for streams, in a few lines.
//
//	proxy LISTEN UPSTREAM_URL
package main

import (
	"log"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"time"
)

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: proxy LISTEN UPSTREAM_URL")
	}
	upstream, err := url.Parse(os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(upstream)
	proxy.FlushInterval = -1 // every write at once, or streams come in lumps
	proxy.Transport = &http.Transport{
		MaxIdleConnsPerHost: 2048, // the default of 2 would connect anew most of the time
		IdleConnTimeout:     90 * time.Second,
		DisableCompression:  true, // else it asks for gzip and unpacks the answer
	}
	log.Fatal(http.ListenAndServe(os.Args[1], proxy))
}
